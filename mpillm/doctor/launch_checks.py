"""Checks of MPI and its launcher: library, versions, PMI, thread level, survival of lost ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from launch.check_world import WrongLauncher, library_title
from launch.environment import EXIT_FILE
from launch.launcher import EveryRankError, find_launcher
from mpillm.doctor.findings import Line, RankCounts, Status, Verdict, World, by_verdict, check
from mpillm.version import __version__

Launches = Mapping[int, "LaunchFacts"]


class LaunchFacts(NamedTuple):
    """Launcher, versions and MPI properties of one rank."""

    versions: dict[str, str]  # mpillm, Python, MPI (with its name)
    launcher: str  # "": none
    protocol: str  # PMIx or PMI; "": none
    survives: bool | None  # the loss of another rank; None: one rank alone
    supervised: bool  # `mpillm mpirun` started it
    threads: bool  # MPI_THREAD_MULTIPLE is granted


def launch_facts() -> LaunchFacts:
    """Query MPI, which must have been started."""
    from mpi4py import MPI

    launcher = find_launcher()
    survives: bool | None = None
    if MPI.COMM_WORLD.size > 1:
        try:
            MPI.COMM_WORLD.Get_failed().Free()
            survives = True
        except (MPI.Exception, NotImplementedError):
            survives = False
    return LaunchFacts(
        versions={
            "mpillm": __version__,
            "Python": sys.version.split()[0],
            "MPI": library_title(MPI.Get_library_version()),
        },
        launcher=launcher.name if launcher else "",
        protocol=launcher.protocol if launcher else "",
        survives=survives,
        supervised=EXIT_FILE in os.environ,
        threads=MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
    )


def not_one_world(error: EveryRankError) -> Line:
    """Return the line for ranks that cannot start MPI, or that would each be a separate world."""
    if isinstance(error, WrongLauncher):
        advice = str(error)[len(error.problem) :].strip()
        return Line("launcher", Status.FAILURE, error.problem, advice)
    return Line("MPI library", Status.FAILURE, str(error))


# --- checks ---


def library(launches: Launches, world: World) -> list[Line]:
    """Check that versions are equal: the start of a run rejects ranks whose versions differ."""
    n_kinds = len({tuple(facts.versions.items()) for facts in launches.values()})

    def verdict(facts: LaunchFacts) -> Verdict:
        text = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if name != "MPI")
        text = f"{facts.versions['MPI']}, {text}"
        if n_kinds == 1:
            return Verdict(Status.OK, text)
        return Verdict(Status.FAILURE, text, "install the same on all nodes: ranks that differ don't join")

    return by_verdict("versions", {rank: verdict(facts) for rank, facts in launches.items()})


@check("launcher")
def launcher(facts: LaunchFacts, counts: RankCounts) -> Verdict:
    """Report the launcher; the start of MPI has checked that the ranks are one world."""
    if not facts.launcher:
        return Verdict(Status.OK, "none: one rank, started alone")
    by = f"{facts.launcher} over {facts.protocol}" if facts.protocol else facts.launcher
    return Verdict(Status.OK, f"{by}: one world of {counts.n_ranks}")


@check("threads")
def threads(facts: LaunchFacts, _: RankCounts) -> Verdict:
    """Check that MPI allows the separate thread that sends heartbeats."""
    if facts.threads:
        return Verdict(Status.OK, "MPI_THREAD_MULTIPLE")
    return Verdict(Status.FAILURE, "no MPI_THREAD_MULTIPLE", "use an MPI library that was built with it")


@check("lost ranks")
def lost_ranks(facts: LaunchFacts, _: RankCounts) -> Verdict:
    """Check that a run can name a lost rank (ULFM), and which process then ends the run."""
    if facts.survives is None:
        return Verdict(Status.SKIPPED, "one rank alone")
    if not facts.survives:
        return Verdict(
            Status.WARNING,
            "this MPI has no fault tolerance (ULFM)",
            "a lost rank may be named late or not at all: Open MPI 5 and MPICH 5 have it",
        )
    if facts.supervised:
        return Verdict(Status.OK, "ULFM; rank 0 names a lost rank")
    return Verdict(
        Status.OK,
        "ULFM; this launcher ends all ranks soon after a loss, `mpillm mpirun` lets rank 0 report",
    )


CHECKS = (library, launcher, threads, lost_ranks)
