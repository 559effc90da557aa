"""MLCommons' rules for a submission. `Workload` has the rules for one benchmark.

Source: the submission checker in mlcommons/inference (tools/submission/submission_checker/constants.py,
August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from disagg.errors import ConfigError
from mpillm.workloads import Workload
from mpillm.workloads.rounds import Round, round_of

STATUSES = ("available", "preview", "rdi")
SYSTEM_TYPES = ("datacenter", "edge", "datacenter,edge", "edge,datacenter")


_SEEDS = ("effective_qsl_rng_seed", "effective_sample_index_rng_seed", "effective_schedule_rng_seed")


def logged_round(detail: Mapping[str, object]) -> Round | None:
    """Return the round of a run from its detailed log; None if its seeds belong to no known round."""
    return round_of(tuple(detail.get(key) for key in _SEEDS))


def place(workload: Workload, accuracy_target: float, loadgen_scenario: str) -> tuple[str, str]:
    """Return the names of the folders for benchmark and scenario.

    The interactive form of a workload is a scenario of its benchmark. LoadGen runs it as Server with other
    limits.
    """
    scenario = loadgen_scenario
    if workload.interactive_of:
        if scenario != "Server":
            raise ConfigError(
                f"{workload.name} is run in scenario Server; there is no {scenario} of it to submit"
            )
        scenario = "Interactive"
    return workload.benchmark(accuracy_target), scenario


@dataclass(frozen=True)
class Problem:
    """A reason why a submission is not accepted."""

    text: str
    # Checks of the submission checker that fail; empty: only the rules forbid it.
    checks: tuple[str, ...] = ()


STOPS = "it stops there"
"""Placeholder for a check at which the checker ends with a traceback."""


def missing_scenarios(workload: Workload, scenarios: set[str]) -> list[str]:
    """Return the scenarios that a closed submission of a workload lacks."""
    return [
        f"one of {' and '.join(either)}" if len(either) > 1 else either[0]
        for either in workload.submission.scenarios
        if scenarios.isdisjoint(either)
    ]


MIN_DURATION_MS = 600_000
"""Minimum duration of a performance test."""

FREE_SETTINGS = (
    *("target_qps", "min_duration", "min_query_count", "performance_sample_count_override"),
    *("coalesce_queries", "max_async_queries", "print_timestamps"),
)
"""Last parts of the keys that a submitter's user.conf may set; the benchmark fixes the others."""

# Required fields of the system description: with a value, and possibly empty.
SYSTEM_MEANINGFUL = (
    *("division", "submitter", "system_type", "status", "system_name", "number_of_nodes"),
    *("host_processor_model_name", "host_processors_per_node", "host_processor_core_count"),
    *("host_memory_capacity", "host_memory_configuration", "host_storage_capacity", "host_storage_type"),
    *("host_networking", "host_network_card_count", "host_networking_topology"),
    *("accelerators_per_node", "accelerator_model_name", "accelerator_memory_capacity"),
    *("accelerator_host_interconnect", "accelerator_memory_configuration", "accelerator_interconnect"),
    *("cooling", "framework", "operating_system", "other_software_stack"),
)
SYSTEM_MAY_BE_EMPTY = (
    *("host_processor_frequency", "host_processor_caches", "host_processor_interconnect"),
    *("accelerator_frequency", "accelerator_interconnect_topology", "accelerator_on-chip_memories"),
    *("hw_notes", "sw_notes", "system_type_detail"),
)
MEASUREMENTS = (
    *("input_data_types", "retraining", "starting_weights_filename"),
    *("weight_data_types", "weight_transformations"),
)


def folder_name(option: str, value: str | None) -> str:
    """Return the value of an option, checked as a folder's name. Raises ConfigError."""
    if not value:
        raise ConfigError(f"--{option} is missing")
    if not re.fullmatch(r"[\w][\w.+-]*", value):
        raise ConfigError(f"--{option} {value}: must be a folder name of letters, digits and . _ + -")
    return value
