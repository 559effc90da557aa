"""What runs where: the disaggregation YAML, its generator, the world plan. Pure data: no MPI, no process."""

from .config import DisaggConfig, ServerConfig, dump, from_mapping, load, parse
from .errors import ConfigError, nearest
from .generator import CONTROL_RANKS, generate, ranks_for, with_hosts
from .plan_table import ranges, rank_list, table
from .world_plan import InstancePlan, RankPlan, WorldPlan, parse_nodes, plan

__all__ = [
    "CONTROL_RANKS",
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
    "ranges",
    "rank_list",
    "ranks_for",
    "table",
    "with_hosts",
]
