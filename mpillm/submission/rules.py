"""MLCommons' rules for a submission.

The facts are from the submission checker in mlcommons/inference
(tools/submission/submission_checker/constants.py, August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.errors import ConfigError

STATUSES = ("available", "preview", "rdi")
SYSTEM_TYPES = ("datacenter", "edge", "datacenter,edge", "edge,datacenter")

# The checker's name of a benchmark with two accuracy targets, 99 % and 99.9 %, contains the target.
_TWO_TARGETS = ("llama2-70b",)
_INTERACTIVE = "-interactive"


@dataclass(frozen=True)
class Round:
    """A round of MLPerf Inference. A run belongs to the round whose seeds its LoadGen has."""

    name: str  # the checker's
    seeds: tuple[int, int, int]  # qsl, sample index, schedule
    benchmarks: tuple[str, ...]


ROUNDS = (
    # mlcommons-loadgen 6.0.16 and later
    Round("v6.1", (2085463073848966840, 2747215439041700203, 16159082839903944936), ("llama2-70b-99.9",)),
    # mlcommons-loadgen 6.0.9 to 6.0.15
    Round(
        "v6.0",
        (2465351861681999779, 14276810075590677512, 3936089224930324775),
        ("llama2-70b-99", "llama2-70b-99.9", "mixtral-8x7b", "llama3.1-405b"),
    ),
)
_SEEDS = ("effective_qsl_rng_seed", "effective_sample_index_rng_seed", "effective_schedule_rng_seed")


def round_of(detail: Mapping[str, object]) -> Round | None:
    """Return the round of a run from its detailed log; None if no round known here has its seeds."""
    seeds = tuple(detail.get(key) for key in _SEEDS)
    return next((r for r in ROUNDS if r.seeds == seeds), None)


def place(workload: str, accuracy_target: float, loadgen_scenario: str) -> tuple[str, str]:
    """Return the names of the folders for benchmark and scenario.

    A workload's interactive form is a scenario of its benchmark; LoadGen runs it as Server with limits of its
    own.
    """
    benchmark = workload.removesuffix(_INTERACTIVE)
    scenario = loadgen_scenario
    if workload.endswith(_INTERACTIVE):
        if scenario != "Server":
            raise ConfigError(f"{workload} is run in scenario Server; there is no {scenario} of it to submit")
        scenario = "Interactive"
    return (f"{benchmark}-{100 * accuracy_target:g}" if benchmark in _TWO_TARGETS else benchmark), scenario


@dataclass(frozen=True)
class Problem:
    """A reason why a submission is not accepted."""

    text: str
    checks: tuple[str, ...] = ()  # of the submission checker, that fail; empty if only the rules forbid it


STOPS = "it stops there"
"""Stands for a check where the checker ends with a traceback."""


@dataclass(frozen=True)
class Limits:
    """The latencies that the checker allows a Server run."""

    ttft_ms: float
    tpot_ms: float
    target_ms: float  # of a whole answer, if user.conf sets one


LATENCY_LIMITS = {
    "llama2-70b-99": Limits(2000, 200, 20_000),
    "llama2-70b-99.9": Limits(2000, 200, 20_000),
    "mixtral-8x7b": Limits(2000, 200, 20_000),
    "llama3.1-405b": Limits(6000, 175, 60_000),
}


def has_scenarios(system_type: str) -> bool:
    """Return whether the closed division has these benchmarks for this kind of system."""
    return "datacenter" in system_type


def missing_scenarios(benchmark: str, scenarios: set[str]) -> list[str]:
    """Return the scenarios that a closed datacenter submission of `benchmark` lacks."""
    required = ("Offline", "Server") if benchmark == "mixtral-8x7b" else ("Offline",)
    missing = [name for name in required if name not in scenarios]
    if benchmark != "mixtral-8x7b" and not scenarios & {"Server", "Interactive"}:
        missing.append("one of Server and Interactive")
    return missing


MIN_DURATION_MS = 600_000
"""The shortest duration of a performance test."""

FREE_SETTINGS = (
    *("target_qps", "min_duration", "min_query_count", "performance_sample_count_override"),
    *("coalesce_queries", "max_async_queries", "print_timestamps"),
)
"""What a submitter's user.conf may set, by the last word of its keys; the benchmark fixes the rest."""

# The system description: the required fields, and those of them that must not be empty.
SYSTEM_MEANINGFUL = (
    "division",
    "submitter",
    "system_type",
    "status",
    "system_name",
    "number_of_nodes",
    "host_processor_model_name",
    "host_processors_per_node",
    "host_processor_core_count",
    "host_memory_capacity",
    "host_memory_configuration",
    "host_storage_capacity",
    "host_storage_type",
    "host_networking",
    "host_network_card_count",
    "host_networking_topology",
    "accelerators_per_node",
    "accelerator_model_name",
    "accelerator_memory_capacity",
    "accelerator_host_interconnect",
    "accelerator_memory_configuration",
    "accelerator_interconnect",
    "cooling",
    "framework",
    "operating_system",
    "other_software_stack",
)
SYSTEM_MAY_BE_EMPTY = (
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "accelerator_frequency",
    "accelerator_interconnect_topology",
    "accelerator_on-chip_memories",
    "hw_notes",
    "sw_notes",
    "system_type_detail",
)
MEASUREMENTS = (
    "input_data_types",
    "retraining",
    "starting_weights_filename",
    "weight_data_types",
    "weight_transformations",
)
