"""Checks of the Python packages that mpillm and its extras require, on all nodes, and of the C compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import NamedTuple

import disagg
from mpillm.core_names import load_object, provided
from mpillm.doctor.findings import Line, RankCounts, Status, Verdict, World, by_verdict, check
from mpillm.engine.kernels.c_library import compiler

_DEVELOPMENT = ("lint", "test")  # extras for the development of mpillm
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,\s.-]+\])?\s*\(?([^;)]*)\)?\s*(?:;.*)?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")

Installed = Mapping[int, "PackageFacts"]


class PackageFacts(NamedTuple):
    """The packages of one rank's Python."""

    required: dict[str, str] | None  # problem by package; None: mpillm itself is not installed
    extras: dict[str, tuple[str, ...]]  # missing or unsuitable packages by extra
    versions: dict[str, str]  # by installed package
    compiler: str | None = None  # of C
    programs: tuple[tuple[str, str], ...] = ()  # other installed programs; their problem, or ""


def package_facts(requires: Callable[[str], list[str] | None] = metadata.requires) -> PackageFacts:
    """Compare the installed packages with mpillm's metadata, without importing them."""
    try:
        requirements = requires("mpillm") or []
    except metadata.PackageNotFoundError:
        return PackageFacts(None, {}, {}, compiler(), _program_problems())
    required: dict[str, str] = {}
    extras: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    for requirement in requirements:
        match, extra = _REQUIREMENT.match(requirement), _EXTRA.search(requirement)
        if match is None or (extra and extra[1] in _DEVELOPMENT):
            continue
        name, limits = match[1], match[2].strip()
        lacks = extras.setdefault(extra[1], []) if extra else None
        if name == "mpillm":  # an extra that requires another extra, which has its own entry
            continue
        version = _version(name)
        if version is not None:
            versions[name] = version
        problem = "is not installed" if version is None else _version_problem(version, limits)
        if problem and lacks is None:
            required[name] = problem
        elif problem and lacks is not None:
            lacks.append(name)
    lacking = {extra: tuple(lacks) for extra, lacks in extras.items()}
    return PackageFacts(required, lacking, versions, compiler(), _program_problems())


def _program_problems() -> tuple[tuple[str, str], ...]:
    problems = []
    for program, place in provided("EXAMINED").items():
        problem = load_object(place)()
        problems += [] if problem is None else [(program, problem)]
    return tuple(problems)


# --- checks ---


@check("packages")
def packages(facts: PackageFacts, _: RankCounts) -> Verdict:
    """Check the packages that every command needs."""
    if facts.required is None:
        return Verdict(Status.SKIPPED, "mpillm runs from a folder, where nothing says what it requires")
    if not facts.required:
        return Verdict(Status.OK, "all that mpillm requires")
    text = ", ".join(f"{name} {problem}" for name, problem in facts.required.items())
    return Verdict(Status.FAILURE, text, f"pip install {' '.join(facts.required)}")


@check("extras")
def extras(facts: PackageFacts, _: RankCounts) -> Verdict:
    """List the packages that some cores and commands need."""
    if facts.required is None:
        return Verdict(Status.SKIPPED, "as above")
    complete = [name for name, lacks in facts.extras.items() if not lacks]
    missing = [f"{name} ({', '.join(lacks)})" for name, lacks in facts.extras.items() if lacks]
    text = f"there: {', '.join(complete) or 'none'}"
    text += f"; not: {', '.join(missing)}" if missing else ""
    return Verdict(Status.OK, text)


def same_packages(installed: Installed, world: World) -> list[Line]:
    """Check that all nodes have the same versions: different ones may compute different results."""
    if len(world.first_ranks()) == 1:
        return []
    ranks_by_version: dict[str, dict[str, list[int]]] = {}
    for rank, facts in sorted(installed.items()):
        for name in {name for other in installed.values() for name in other.versions}:
            versions = ranks_by_version.setdefault(name, {})
            versions.setdefault(facts.versions.get(name, "none"), []).append(rank)
    differ = {name: versions for name, versions in sorted(ranks_by_version.items()) if len(versions) > 1}
    if not differ:
        return [Line("same packages", Status.OK, "on all nodes")]
    text = "; ".join(
        f"{name} "
        + " or ".join(
            f"{version} of {disagg.rank_list(ranks, world.nodes)}" for version, ranks in versions.items()
        )
        for name, versions in differ.items()
    )
    return [Line("same packages", Status.WARNING, text, "install the same on all nodes")]


@check("C compiler")
def c_compiler(facts: PackageFacts, _: RankCounts) -> Verdict:
    """Check for the compiler of the embedded engine's CPU kernels and of Triton's launchers on GPUs."""
    if facts.compiler is not None:
        return Verdict(Status.OK, facts.compiler)
    advice = "install one (Debian: gcc and libc6-dev), or name one with CC"
    return Verdict(Status.WARNING, "none: the embedded engine is up to 8 times slower on CPUs", advice)


def programs(installed: Installed, world: World) -> list[Line]:
    """Check that installed programs can load this Python's packages."""
    verdicts: dict[str, dict[int, Verdict]] = {}
    for rank, facts in installed.items():
        for name, problem in facts.programs:
            verdict = (Status.WARNING, problem) if problem else (Status.OK, "finds packages that fit")
            verdicts.setdefault(name, {})[rank] = Verdict(*verdict)
    return [line for name, by_rank in verdicts.items() for line in by_verdict(name, by_rank)]


CHECKS = (packages, extras, same_packages, c_compiler, programs)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version_problem(version: str, limits: str) -> str:
    """Return the limit that a version violates (``is 1.0, not >=2.0``); "" if it is within `limits`."""
    own = _numbers(version)
    for limit in filter(None, (part.strip() for part in limits.split(","))):
        match = re.fullmatch(r"(>=|<)\s*([\w.]+)", limit)
        if match and (own < _numbers(match[2])) == (match[1] == ">="):
            return f"is {version}, not {limit}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return (*numbers, 0, 0, 0)[:3]
