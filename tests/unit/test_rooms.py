"""Rooms are packages. A room imports, or names in a string, only rooms before it in ROOMS.

Files import each other in no circle.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the ground up. Rooms on one line do not import each other.
ROOMS = """
disagg mpillm.phases mpillm.version
launch mpillm.core_names mpillm.workloads mpillm.devices
mpillm.files
mpillm.errors mpillm.user_config mpillm.telemetry mpillm.configurator mpillm.servers mpillm.harnesses
mpillm.fields mpillm.comms
mpillm.models mpillm.data
mpillm.config mpillm.nvidia.triton_client
mpillm.loadgen mpillm.engine mpillm.nvidia
mpillm.cores mpillm.doctor mpillm.nvidia.stages
mpillm.roles mpillm.nvidia.trtllm
mpillm.report mpillm.endpoint mpillm.nvidia.triton
mpillm.runs mpillm.bench.loadtest mpillm.runtime mpillm.nvidia.triton_core mpillm.nvidia.triton_models
mpillm.bench mpillm.experiments mpillm.submission mpillm.nvidia.core_model mpillm.nvidia.halves
mpillm.commands mpillm.experiments.commands mpillm.submission.commands mpillm.nvidia.table
mpillm.cli mpillm.bench.commands mpillm.nvidia.commands mpillm.nvidia.leader
mpillm.__main__ mpillm.llmlib benchmarks
"""
FLOOR = {room: floor for floor, line in enumerate(ROOMS.split("\n")) for room in line.split()}
# ``module:function``, whole or as the start of an f-string
NAMED = re.compile(r"((?:disagg|launch|mpillm)(?:\.\w+)*):\w*")
# What the core finds by name only: none of its rooms imports them, or names anything in them.
WINGS = ("mpillm.experiments", "mpillm.bench", "mpillm.nvidia", "mpillm.submission", "mpillm.llmlib")
# the tables of names and classes, like the entry points of a package: registries follow them
TABLES = ("mpillm.core_names", *WINGS[:-1])
VERSION = "mpillm"  # every room may import the package itself: the version, and names that wait to be used


@cache
def files() -> dict[str, Path]:
    """Return every module by its name."""
    found = {}
    for package in ("disagg", "launch", "mpillm", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str) -> Iterator[str]:
    """Yield the modules of ours that `name` imports, at the top, inside functions, or for type checks."""
    path = files()[name]
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files())
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{module}.{alias.name}"
                if full in files():
                    yield full
                elif module in files():
                    yield module


def named(name: str) -> Iterator[str]:
    """Yield the modules of ours of which `name` names something by a string."""
    for node in ast.walk(ast.parse(files()[name].read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (match := NAMED.fullmatch(node.value))
        ):
            yield match[1]


def room(name: str) -> str:
    """Return the room that a module stands in: the longest name in ROOMS that it begins with."""
    parts = name.split(".")
    known = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((prefix for prefix in known if prefix in FLOOR), name)


def test_every_module_is_in_a_room() -> None:
    assert sorted(name for name in files() if room(name) not in FLOOR and name != VERSION) == []


def test_every_room_is_there() -> None:
    assert sorted(set(FLOOR) - {room(name) for name in files()}) == []


def up(name: str, others: Iterator[str]) -> list[str]:
    """Return the arrows from `name` to modules that do not stand below it."""
    return [
        f"{name} -> {other}"
        for other in sorted(set(others))
        if VERSION not in (name, other)
        and room(name) != room(other)
        and FLOOR[room(other)] >= FLOOR[room(name)]
    ]


def test_rooms_import_only_rooms_below_them() -> None:
    assert [arrow for name in sorted(files()) for arrow in up(name, imported(name))] == []


def test_rooms_name_only_rooms_below_them() -> None:
    assert [arrow for name in sorted(files()) if name not in TABLES for arrow in up(name, named(name))] == []


@pytest.mark.long
def test_the_core_knows_each_wing_by_one_name_only() -> None:
    """Whatever stands in a string counts; the laboratory may measure the wing, too."""
    of_the_wing = re.compile(rf"({'|'.join(map(re.escape, WINGS))})([.:].*)?")
    core = [
        name for name in sorted(files()) if not of_the_wing.fullmatch(name) and room(name) != "benchmarks"
    ]
    assert [
        f"{name}: {found}"
        for name in core
        for found in [*imported(name), *strings(name)]
        if of_the_wing.fullmatch(found)
    ] == [f"mpillm.core_names: {wing}" for wing in WINGS[:-1]]


def strings(name: str) -> Iterator[str]:
    """Yield the strings of a module but its docstrings."""
    tree = ast.parse(files()[name].read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_a_name_in_a_string_is_an_arrow() -> None:
    assert "mpillm.nvidia.triton.servers" in set(named("mpillm.nvidia.triton_core.core"))
    assert "mpillm.cores.torch_core" in set(named(TABLES[0]))
    assert up("mpillm.cores.torch_core", iter(["mpillm.engine.engine"])) == []
    assert up("mpillm.engine.engine", iter(["mpillm.cores.torch_core"])) == [
        "mpillm.engine.engine -> mpillm.cores.torch_core"
    ]


@pytest.mark.long
def test_files_do_not_import_each_other_in_a_circle() -> None:
    assert circles({name: {*imported(name)} - {name, VERSION} for name in files()}) == []


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules in which each imports itself by way of others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        waiting, seen = [*graph[start]], set[str]()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph[name]
        reached[start] = seen
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def test_the_top_stays_small() -> None:
    assert len(list((ROOT / "mpillm").glob("*.py"))) <= 10


def test_every_room_says_what_lives_there() -> None:
    silent = [
        name
        for name, path in files().items()
        if path.stem == "__init__" and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_the_picture_in_the_architecture_has_every_room() -> None:
    """Of those that are folders: the wings, then the core, higher rooms first."""
    page = (ROOT / "docs/explain/architecture.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"^```\n.*?^```", page, re.MULTILINE | re.DOTALL)
    shown = [
        f"mpillm.{name.replace('/', '.')}" for name in re.findall(r"^ ([\w/]+)/ ", picture, re.MULTILINE)
    ]
    shown = [name if name in FLOOR else name.removeprefix("mpillm.") for name in shown]
    assert sorted(shown) == sorted(
        room for room in FLOOR if (ROOT / room.replace(".", "/")).is_dir() and room != "benchmarks"
    )
    places = [(room.startswith(WINGS), FLOOR[room]) for room in shown]
    assert [is_wing for is_wing, _ in places] == sorted((is_wing for is_wing, _ in places), reverse=True)
    core = [floor for is_wing, floor in places if not is_wing]
    assert core == sorted(core, reverse=True)
