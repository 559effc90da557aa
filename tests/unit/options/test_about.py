"""An error that names an option says so: whoever shows it adds where that option was set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpillm.options.fields import BY_NAME

PACKAGE = Path(__file__).parents[3] / "mpillm"
# Where errors are raised by code that was given values, not the configuration with their sources.
ROOMS = ("builder", "cores", "data", "devices.py", "engine", "loadgen", "workloads")
FILES = [
    path
    for room in ROOMS
    for path in ([PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py")))
]


def text_of(node: ast.AST) -> str:
    """Return the text of a constant, or nothing for another node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def raised(node: ast.AST, around: frozenset[str] = frozenset()) -> Iterator[tuple[ast.Call, frozenset[str]]]:
    """Yield each ConfigError that a definition raises, and the options that it is about: its own, and those
    of the blocks around it."""
    calls = (
        [item.context_expr for item in node.items]
        if isinstance(node, ast.With)
        else getattr(node, "decorator_list", [])
    )
    for call in calls:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "about":
            around |= {name for constant in call.args if (name := text_of(constant))}
    if (
        isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func) in ("ConfigError", "NotHere")
    ):
        own = [keyword.value for keyword in node.exc.keywords if keyword.arg == "about"]
        yield node.exc, around | {name for value in own for n in ast.walk(value) if (name := text_of(n))}
    for child in ast.iter_child_nodes(node):
        yield from raised(child, around)


def first_option(call: ast.Call) -> str | None:
    """Return the option that a message begins with."""
    text = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) else call.args[0]
    match = re.match(r"--(\w+)", str(text.value)) if isinstance(text, ast.Constant) else None
    return match[1] if match and match[1] in BY_NAME else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_an_error_that_begins_with_an_option_is_about_it(path: Path) -> None:
    found = list(raised(ast.parse(path.read_text(encoding="utf-8"))))
    silent = [
        f"line {call.lineno}: --{name}"
        for call, about in found
        if (name := first_option(call)) and name not in about
    ]
    assert silent == []


def test_such_errors_are_found() -> None:
    code = """
@about("seed")
def f():
    with about("top_k"):
        raise ConfigError(f"--dtype {1}: no", about=["dtype"])
raise ConfigError("--seed 1")
"""
    assert [(first_option(call), sorted(about)) for call, about in raised(ast.parse(code))] == [
        ("dtype", ["dtype", "seed", "top_k"]),
        ("seed", []),
    ]
