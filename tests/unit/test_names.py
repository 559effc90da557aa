"""Files, classes and functions that the pages name are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
"""Not the dated notes in benchmarks/, which tell of the files of their day."""
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = ("mpillm", "launch", "disagg", "benchmarks", "examples", "tests", "tools")
"""The folders whose files pages name."""
ARCHITECTURE = ROOT / "docs/explain/architecture.md"
_PATH = re.compile(r"~?[\w.-]*/[\w./-]*")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def in_backticks(page: Path) -> set[str]:
    """Return what a page sets as code within its text."""
    return set(re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text(encoding="utf-8"))))


def defined(names: set[str]) -> set[str]:
    """Return those of some names that our files define: `Class.name`, `module.name`, or a name alone."""
    found: set[str] = set()
    for file in (file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found |= (of_file := _defined_in(tree)) | {f"{file.stem}.{name}" for name in of_file}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{name}" for name in _defined_in(node)}
    return names & found


def _defined_in(top: ast.AST) -> set[str]:
    """Return the names of classes, functions, variables and attributes that are defined in a tree."""
    return {
        name
        for node in ast.walk(top)
        if (name := getattr(node, "name", getattr(node, "attr", getattr(node, "id", None))))
        and (
            isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            or isinstance(getattr(node, "ctx", None), ast.Store)
        )
    }


@pytest.mark.parametrize(
    "page",
    PAGES,
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """Paths from the top of the repository, in every page; in that of the architecture also from mpillm/."""
    named = {text.partition("::")[0] for text in in_backticks(page)}
    paths = {text for text in named if _PATH.fullmatch(text)}
    missed = {
        text
        for text in paths
        if (text.partition("/")[0] in CODE or page == ARCHITECTURE)
        and not (ROOT / text).exists()
        and not (page == ARCHITECTURE and (ROOT / "mpillm" / text).exists())
    }
    assert not missed


@pytest.mark.long
def test_names_in_the_architecture_are_there() -> None:
    """Files that are named without their folder, classes, and functions, as `Class.function` or alone."""
    files = {file.name for folder in CODE for file in (ROOT / folder).rglob("*")}
    names = {text for text in in_backticks(ARCHITECTURE) if _NAME.fullmatch(text)} - files
    others = {"call_soon_threadsafe", "MPI_Abort", "config.json", "result.json", "sweep", "trtllm_hlapi"}
    """Of asyncio and MPI, files of a run, a command, a core."""
    assert names - others - defined(names) == set()
