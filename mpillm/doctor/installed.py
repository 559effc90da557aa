"""Python packages that mpillm and its extras require, whether the nodes have the same, and the C compiler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from typing import NamedTuple

import disagg
from mpillm.core_names import brought, found_at
from mpillm.doctor.findings import Line, Place, Status, Verdict, World, by_verdict, check
from mpillm.engine.kernels.c_library import compiler

_DEVELOPMENT = ("lint", "test")  # extras of those who change mpillm
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,\s.-]+\])?\s*\(?([^;)]*)\)?\s*(?:;.*)?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")

Installed = Mapping[int, "PackageFacts"]


class PackageFacts(NamedTuple):
    """The packages of one rank's Python."""

    required: dict[str, str] | None  # what is wrong, by package; None: mpillm itself is not installed
    extras: dict[str, tuple[str, ...]]  # what each extra lacks
    versions: dict[str, str]  # of those that are there
    compiler: str | None = None  # of C
    programs: tuple[tuple[str, str], ...] = ()  # others that are there, and what is wrong with each


def package_facts() -> PackageFacts:
    """Compare what is installed with what mpillm's metadata require, without importing anything."""
    try:
        requirements = metadata.requires("mpillm") or []
    except metadata.PackageNotFoundError:
        return PackageFacts(None, {}, {}, compiler(), _examined())
    required: dict[str, str] = {}
    extras: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    for text in requirements:
        match, extra = _REQUIREMENT.match(text), _EXTRA.search(text)
        if match is None or (extra and extra[1] in _DEVELOPMENT):
            continue
        name, limits = match[1], match[2].strip()
        lacks = extras.setdefault(extra[1], []) if extra else None
        if name == "mpillm":  # one extra that needs another: the other has its own entry
            continue
        version = _version(name)
        if version is not None:
            versions[name] = version
        wrong = "is not installed" if version is None else _outside(version, limits)
        if wrong and lacks is None:
            required[name] = wrong
        elif wrong and lacks is not None:
            lacks.append(name)
    lacking = {extra: tuple(lacks) for extra, lacks in extras.items()}
    return PackageFacts(required, lacking, versions, compiler(), _examined())


def _examined() -> tuple[tuple[str, str], ...]:
    found = []
    for program, place in brought("EXAMINED").items():
        wrong = found_at(place)()
        found += [] if wrong is None else [(program, wrong)]
    return tuple(found)


# --- checks ---


@check("packages")
def packages(facts: PackageFacts, _: Place) -> Verdict:
    """What every command needs."""
    if facts.required is None:
        return Verdict(Status.SKIPPED, "mpillm runs from a folder, where nothing says what it requires")
    if not facts.required:
        return Verdict(Status.OK, "all that mpillm requires")
    told = ", ".join(f"{name} {wrong}" for name, wrong in facts.required.items())
    return Verdict(Status.FAILURE, told, f"pip install {' '.join(facts.required)}")


@check("extras")
def extras(facts: PackageFacts, _: Place) -> Verdict:
    """What some cores and commands need."""
    if facts.required is None:
        return Verdict(Status.SKIPPED, "as above")
    there = [name for name, lacks in facts.extras.items() if not lacks]
    missing = [f"{name} ({', '.join(lacks)})" for name, lacks in facts.extras.items() if lacks]
    told = f"there: {', '.join(there) or 'none'}"
    told += f"; not: {', '.join(missing)}" if missing else ""
    return Verdict(Status.OK, told)


def same_packages(installed: Installed, world: World) -> list[Line]:
    """The same package in two versions computes, now and then, two answers."""
    if len(world.first_ranks()) == 1:
        return []
    found: dict[str, dict[str, list[int]]] = {}
    for rank, facts in sorted(installed.items()):
        for name in {name for other in installed.values() for name in other.versions}:
            found.setdefault(name, {}).setdefault(facts.versions.get(name, "none"), []).append(rank)
    differ = {name: kinds for name, kinds in sorted(found.items()) if len(kinds) > 1}
    if not differ:
        return [Line("same packages", Status.OK, "on all nodes")]
    told = "; ".join(
        f"{name} "
        + " or ".join(
            f"{version} of {disagg.rank_list(ranks, world.nodes)}" for version, ranks in kinds.items()
        )
        for name, kinds in differ.items()
    )
    return [Line("same packages", Status.WARNING, told, "install the same on all nodes")]


@check("C compiler")
def c_compiler(facts: PackageFacts, _: Place) -> Verdict:
    """What the embedded engine compiles with: its kernels for CPUs, and Triton's launchers on GPUs."""
    if facts.compiler is not None:
        return Verdict(Status.OK, facts.compiler)
    advice = "install one (Debian: gcc and libc6-dev), or name one with CC"
    return Verdict(Status.WARNING, "none: the embedded engine is up to 8 times slower on CPUs", advice)


def programs(installed: Installed, world: World) -> list[Line]:
    """Whether programs that are there, and load this Python's packages, can."""
    found: dict[str, dict[int, Verdict]] = {}
    for rank, facts in installed.items():
        for name, wrong in facts.programs:
            verdict = (Status.WARNING, wrong) if wrong else (Status.OK, "finds packages that fit")
            found.setdefault(name, {})[rank] = Verdict(*verdict)
    return [line for name, verdicts in found.items() for line in by_verdict(name, verdicts)]


CHECKS = (packages, extras, same_packages, c_compiler, programs)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _outside(version: str, limits: str) -> str:
    """Return what is wrong with a version; "" if it is within ``>=2.0,<3``."""
    own = _numbers(version)
    for limit in filter(None, (part.strip() for part in limits.split(","))):
        match = re.fullmatch(r"(>=|<)\s*([\w.]+)", limit)
        if match and (own < _numbers(match[2])) == (match[1] == ">="):
            return f"is {version}, not {limit}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return (*numbers, 0, 0, 0)[:3]
