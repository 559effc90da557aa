"""``benchmarks scale``: what leader and rank 0 cost in a simulated cluster, by number of instances."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mpillm.options.field import Field
from mpillm.options.fields.deadlines import DeadlineFields
from mpillm.options.fields.topology import TopologyFields
from mpillm.options.options import parse_run
from mpillm.options.parsers import integers
from mpillm.options.values import Values
from mpillm.phases import PHASES

if TYPE_CHECKING:
    from benchmarks.simulated_cluster import RoutedCluster

_REQUESTS = 400  # in each of _TURNS
_TURNS = 5
_BATCH = 2048
_LIVE_S = 10.0  # of simulated time


class Options(Values):
    """Options of ``benchmarks scale``."""

    instances = Field(
        "instances",
        "numbers of instances, of two ranks each, separated by commas",
        integers,
        default=(64, 512, 4096),
        group="benchmark",
    )


DESCRIPTION = "Measure leader and rank 0 on a simulated cluster: one process, no MPI."
EPILOG = "example:\n  python -m benchmarks scale --instances 64,512"


def main(config: Options) -> int:
    """Print a column for each number of instances."""
    columns = [_column(n) for n in config.instances]
    print("simulated cluster, two ranks per instance; CPU time of one process")
    for i, (name, unit, _) in enumerate(columns[0]):
        print(f"  {name:<46} {unit:<10}" + "".join(f"{column[i][2]:>12,.6g}" for column in columns))
    return 0


def _column(n: int) -> list[tuple[str, str, float]]:
    # They import mpi4py, without which --help does; MPI itself is not needed, and would leave its files.
    import mpi4py

    mpi4py.rc.initialize = False
    from benchmarks.simulated_cluster import ControlledCluster, RoutedCluster, plan_of
    from mpillm.comms.watch import beat_interval_s

    plan_s = _cpu(lambda: plan_of(n))
    plan = plan_of(n)
    n_ranks = len(plan.ranks)
    rows: list[tuple[str, str, float]] = [
        ("instances", "", n),
        ("ranks", "", n_ranks),
        ("plan", "s", plan_s),
    ]
    for policy in TopologyFields.traffic_distribution_policy.choices:
        cluster = RoutedCluster(plan, policy)
        one = min(_cpu(partial(_requests, cluster)) for _ in range(_TURNS)) / _REQUESTS
        rows.append((f"request in and out, {policy}", "us", round(one * 1e6, 2)))
        many = _cpu(partial(cluster.ask, _BATCH)) / _BATCH
        rows.append((f"request of a batch of {_BATCH}, {policy}", "us", round(many * 1e6, 2)))
    values = parse_run(["--core_type", "dummy"]).values
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    controlled = ControlledCluster(plan_of(n), values, DeadlineFields.heartbeat_timeout.default)
    controlled.arrive(PHASES[0])
    routed = RoutedCluster(plan, "load_balancing")
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del routed
    rows.append(("memory of plan, leader and rank 0, per instance", "bytes", round((after - before) / n)))
    controlled = ControlledCluster(plan, values, DeadlineFields.heartbeat_timeout.default)
    sent = 0

    def to_ready() -> None:
        nonlocal sent
        for phase in PHASES[: PHASES.index("test")]:
            sent += controlled.arrive(phase)

    rows.append(("rank 0 from the first join to ready", "s", round(_cpu(to_ready), 4)))
    rows.append(("sent by rank 0 until ready", "MB", round(sent / 1e6, 3)))
    every = beat_interval_s(n_ranks)
    watching = _cpu(lambda: controlled.live(_LIVE_S, every)) / _LIVE_S
    rows.append(("a rank's heartbeats, every", "s", every))
    rows.append(("rank 0's control in the test", "% of core", round(100 * watching, 2)))
    rows.append(("a process that ends is known after", "s", round(controlled.notices(5, every, True), 2)))
    silent = ControlledCluster(plan, values, DeadlineFields.heartbeat_timeout.default)
    for phase in PHASES[: PHASES.index("test")]:
        silent.arrive(phase)
    rows.append(("a rank that falls silent is known after", "s", round(silent.notices(5, every, False), 1)))
    return rows


def _requests(cluster: RoutedCluster) -> None:
    for _ in range(_REQUESTS):
        cluster.ask(1)
        cluster.answer(1)


def _cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started
