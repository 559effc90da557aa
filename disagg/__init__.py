"""The disaggregation YAML, its generator, and the world plan. Pure data: no MPI, no process."""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, nearest

if TYPE_CHECKING:
    from .config import DisaggConfig, ServerConfig, dump, from_mapping, load, parse
    from .generator import CONTROL_RANKS, generate, ranks_for, with_hosts
    from .plan_table import ranges, rank_list, table
    from .world_plan import InstancePlan, RankPlan, WorldPlan, parse_nodes, plan

_FILES = {
    "config": ("DisaggConfig", "ServerConfig", "dump", "from_mapping", "load", "parse"),
    "generator": ("CONTROL_RANKS", "generate", "ranks_for", "with_hosts"),
    "plan_table": ("ranges", "rank_list", "table"),
    "world_plan": ("InstancePlan", "RankPlan", "WorldPlan", "parse_nodes", "plan"),
}
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


def __getattr__(name: str) -> Any:
    """Import a name's module at its first use, because every command imports this package for its errors."""
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"disagg.{file}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
