"""The base class of cores, and their registry."""

from mpillm.cores.registry import BackendRegistry as BackendRegistry
from mpillm.llmlib.cores.base import LLMCore as LLMCore
from mpillm.llmlib.cores.base import LLMRequest as LLMRequest
from mpillm.llmlib.cores.base import LLMResponse as LLMResponse
