"""The classes of NVIDIA's `code.llmlib`, under their names, for cores and harnesses written for them.

The files have the same names as NVIDIA's; the code is mpillm's. `rank_core` adapts such a core to
`mpillm.cores.base.LLMCore`. No other package imports this one. See docs/howto/cores.md.
"""

from mpillm.llmlib.config import GenerationConfig as GenerationConfig
from mpillm.llmlib.config import HarnessConfig as HarnessConfig
from mpillm.llmlib.cores import BackendRegistry as BackendRegistry
from mpillm.llmlib.cores import LLMCore as LLMCore
from mpillm.llmlib.cores import LLMRequest as LLMRequest
from mpillm.llmlib.cores import LLMResponse as LLMResponse
from mpillm.llmlib.dataset import LLMDataLoader as LLMDataLoader
from mpillm.llmlib.factory import LLMServerFactory as LLMServerFactory
from mpillm.llmlib.harness_op import DummyHarnessOp as DummyHarnessOp
from mpillm.llmlib.harness_op import LLMHarnessOp as LLMHarnessOp
from mpillm.llmlib.harness_op import TritonClientHarnessOp as TritonClientHarnessOp
from mpillm.llmlib.harness_op import TrtllmExecutorClientHarnessOp as TrtllmExecutorClientHarnessOp
from mpillm.llmlib.harness_op import TrtllmHLApiClientHarnessOp as TrtllmHLApiClientHarnessOp
from mpillm.llmlib.harness_op import TrtllmServeClientHarnessOp as TrtllmServeClientHarnessOp
from mpillm.llmlib.server import LLMServer as LLMServer
from mpillm.llmlib.utils import LLMServerProgressDisplay as LLMServerProgressDisplay
from mpillm.llmlib.warmup import WarmupManager as WarmupManager
from mpillm.user_config import CoreType as CoreType
