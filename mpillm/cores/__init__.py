"""Backends: the contract `LLMCore` (base), the cores by name (registry), and the cores."""

from mpillm.cores.base import CoreConfig as CoreConfig
from mpillm.cores.base import Credits as Credits
from mpillm.cores.base import LLMCore as LLMCore
from mpillm.cores.base import Metrics as Metrics
from mpillm.cores.registry import BackendRegistry as BackendRegistry
