"""What runs where: the disaggregation YAML, its generator, and the world plan. Pure data: no MPI, no torch, no process."""

from .config import DisaggConfig, ServerConfig, dump, from_mapping, load, parse
from .errors import ConfigError, nearest
from .generator import generate
from .plan import InstancePlan, RankPlan, WorldPlan, parse_nodes, plan
from .table import table

__all__ = [
    "ConfigError",
    "DisaggConfig",
    "InstancePlan",
    "RankPlan",
    "ServerConfig",
    "WorldPlan",
    "dump",
    "from_mapping",
    "generate",
    "load",
    "nearest",
    "parse",
    "parse_nodes",
    "plan",
    "table",
]
