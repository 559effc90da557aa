"""A package imports, or names in a string, only packages before it in LAYERS.

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

# From the ground up. Packages on one line do not import each other, nor do the files beside the packages.
LAYERS = """
disagg
launch mpillm.workloads
mpillm.phases mpillm.version mpillm.files mpillm.devices mpillm.core_names
mpillm.errors mpillm.json_slice
mpillm.telemetry mpillm.programs
mpillm.options mpillm.comms
mpillm.configurator mpillm.fields mpillm.user_config mpillm.data mpillm.loadgen
mpillm.engine mpillm.nvidia
mpillm.cores mpillm.doctor
mpillm.roles mpillm.stages
mpillm.report mpillm.endpoint mpillm.trtllm
mpillm.runtime
mpillm.experiments mpillm.commands
mpillm.cli mpillm.submission mpillm.triton
mpillm.llmlib mpillm.__main__ benchmarks
"""
# The same inside the engine; the files at its top come last.
ENGINE_LAYERS = """
shape
schedule
tensors
parallel
kernels
cache weights
handoff
model
extras
run
speculation
"""
FLOOR = {package: floor for floor, line in enumerate(LAYERS.split("\n")) for package in line.split()}
# ``module:function``, whole or as the start of an f-string
NAMED = re.compile(r"((?:disagg|launch|mpillm)(?:\.\w+)*):\w*")
# The rest finds these by name only: no other package imports them, or names a module of theirs.
PLUGIN_PACKAGES = (
    "mpillm.experiments",
    "mpillm.nvidia",
    "mpillm.stages",
    "mpillm.submission",
    "mpillm.triton",
    "mpillm.trtllm",
    "mpillm.llmlib",
)
# The tables of names and classes, like the entry points of a package: registries follow them.
TABLES = ("mpillm.core_names", *PLUGIN_PACKAGES[:-1])
VERSION = "mpillm"  # every package may import the package itself: the version, and names that wait to be used


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


def owner(name: str) -> str:
    """Return the package of a module: the longest name in LAYERS that it begins with."""
    parts = name.split(".")
    known = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((prefix for prefix in known if prefix in FLOOR), name)


def test_every_module_is_in_a_package() -> None:
    assert sorted(name for name in files() if owner(name) not in FLOOR and name != VERSION) == []


def test_every_package_is_there() -> None:
    assert sorted(set(FLOOR) - {owner(name) for name in files()}) == []


def up(name: str, others: Iterator[str]) -> list[str]:
    """Return the arrows from `name` to modules that do not stand below it."""
    return [
        f"{name} -> {other}"
        for other in sorted(set(others))
        if VERSION not in (name, other)
        and owner(name) != owner(other)
        and FLOOR[owner(other)] >= FLOOR[owner(name)]
    ]


def test_packages_import_only_packages_below_them() -> None:
    assert [arrow for name in sorted(files()) for arrow in up(name, imported(name))] == []


def test_packages_name_only_packages_below_them() -> None:
    assert [arrow for name in sorted(files()) if name not in TABLES for arrow in up(name, named(name))] == []


def engine_floor(name: str) -> int:
    """Return the layer of a module of the engine: files at its top are above all packages."""
    return next((i for i, line in enumerate(ENGINE_LAYERS.split("\n")) if inside(name) in line.split()), 99)


def inside(name: str) -> str:
    """Return the package inside the engine that a module is in: its third name."""
    parts = name.split(".")
    return parts[2] if len(parts) > 3 else ""


def test_packages_inside_the_engine_import_only_packages_below_them() -> None:
    found = {
        f"{name} -> {other}"
        for name in files()
        if name.startswith("mpillm.engine.") and inside(name)
        for other in imported(name)
        if other.startswith("mpillm.engine.")
        and inside(other) != inside(name)
        and engine_floor(other) >= engine_floor(name)
    }
    assert sorted(found) == []


@pytest.mark.parametrize("package", ["shape", "schedule"])
def test_plans_need_no_torch(package: str) -> None:
    """Only functions import it, so that `plan` and the leader of an HTTP run start fast."""
    for path in (ROOT / "mpillm/engine" / package).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            assert not (
                isinstance(node, ast.Import | ast.ImportFrom)
                and any(name.split(".")[0] == "torch" for name in names_of(node))
            ), path


def names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that a statement imports."""
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


@pytest.mark.long
def test_the_rest_names_each_plugin_package_once() -> None:
    """Strings count; `benchmarks/` may import plugin packages."""
    of_a_plugin = re.compile(rf"({'|'.join(map(re.escape, PLUGIN_PACKAGES))})([.:].*)?")
    others = [
        name for name in sorted(files()) if not of_a_plugin.fullmatch(name) and owner(name) != "benchmarks"
    ]
    assert [
        f"{name}: {found}"
        for name in others
        for found in [*imported(name), *strings(name)]
        if of_a_plugin.fullmatch(found)
    ] == [f"mpillm.core_names: {wing}" for wing in PLUGIN_PACKAGES[:-1]]


def strings(name: str) -> Iterator[str]:
    """Yield the strings of a module but its docstrings."""
    tree = ast.parse(files()[name].read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_a_name_in_a_string_is_an_arrow() -> None:
    assert "mpillm.triton.servers" in set(named("mpillm.triton.core.core"))
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
    assert len(list((ROOT / "mpillm").glob("*.py"))) <= 13


def test_every_package_has_a_docstring() -> None:
    silent = [
        name
        for name, path in files().items()
        if path.stem == "__init__" and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_the_picture_in_the_architecture_has_every_package() -> None:
    """Plugin packages come first, and higher packages before lower ones."""
    page = (ROOT / "docs/explain/architecture.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"^```\n.*?^```", page, re.MULTILINE | re.DOTALL)
    packages = [
        f"mpillm.{name.replace('/', '.')}" for name in re.findall(r"^ ([\w/]+)/ ", picture, re.MULTILINE)
    ]
    packages = [name if name in FLOOR else name.removeprefix("mpillm.") for name in packages]
    assert sorted(packages) == sorted(
        name for name in FLOOR if (ROOT / name.replace(".", "/")).is_dir() and name != "benchmarks"
    )
    places = [(package.startswith(PLUGIN_PACKAGES), FLOOR[package]) for package in packages]
    assert [plugs_in for plugs_in, _ in places] == sorted((plugs_in for plugs_in, _ in places), reverse=True)
    core = [floor for plugs_in, floor in places if not plugs_in]
    assert core == sorted(core, reverse=True)


def test_no_test_module_imports_another() -> None:
    """Nor the conftest of another folder: what tests share is in tests/helpers."""
    of_tests = re.compile(r"tests\b(?!\.helpers\b|\.random_\w*faults).*")
    arrows = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for folder in ("tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in names_of(node)
        if of_tests.fullmatch(name)
    ]
    assert arrows == []
