"""Every command that the program, its help and its pages tell a user to type, so that tests can type it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import BENCHES as LABORATORY
from launch.default_paths import RUNS
from mpillm.cli import COMMANDS
from mpillm.experiments.commands.bench import BENCHES

ROOT = Path(__file__).parents[2]
PACKAGES = ("benchmarks", "disagg", "launch", "mpillm")

_COMMAND = re.compile(
    r"(time |[A-Z_]+=\S+ )?(\.venv/bin/)?"
    r"(python3? -m (mpillm|benchmarks) [a-z]|mpirun -n \S+ (python3? -m (mpillm|benchmarks)|make)"
    r" |srun |make [a-z]|\$R )"
)
# What a file with such a command has: each process of pytest-xdist reads the sources before its first test.
_HINT = re.compile(r"-m |make [a-z]|srun |\$R ")
_ASSIGNMENT = re.compile(r"(export )?[A-Z_]+=\"")


@dataclass(frozen=True)
class Advice:
    """Holds a command as it is to be typed, the shell variables that its page sets before it, and where it is
    printed."""

    where: str
    text: str
    setting: tuple[str, ...] = ()


def of_pages() -> Iterator[Advice]:
    """Yield the commands in the code blocks of README.md, docs/ and notes, and those in their sentences."""
    folders = (ROOT / "docs", ROOT / "benchmarks")
    for path in (ROOT / "README.md", *sorted(page for folder in folders for page in folder.rglob("*.md"))):
        where, page = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        setting: list[str] = []
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            for line in [] if language else block.replace("\\\n", "").splitlines():
                command = re.sub(r"\s+#\s.*|\s+&$", "", line.removeprefix("$ "))
                if _ASSIGNMENT.match(command):
                    setting.append(command)
                elif _COMMAND.match(command):
                    yield Advice(where, command, tuple(setting))
        for span in re.findall(
            r"`([^`]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
        ):
            if _COMMAND.match(command := " ".join(span.split())) and "…" not in command:
                yield Advice(where, command)


def of_sources() -> Iterator[Advice]:
    """Yield the commands in the sources' strings: examples of --help on lines of their own, commands in
    messages between backticks."""
    for where, text in _strings(_HINT):
        for line in text.splitlines():
            if line.startswith("  ") and _COMMAND.match(line.strip()):
                yield Advice(where, re.sub(r"\s+#\s.*", "", line.strip()))
        for span in re.findall(r"`([^`]+)`", text):
            if _COMMAND.match(span):
                yield Advice(where, span)


@functools.cache
def strings() -> tuple[tuple[str, str], ...]:
    """Return the strings of the sources except docstrings, each with its file; {} stands for what is filled
    in."""
    return tuple(_strings())


def _strings(hint: re.Pattern[str] = re.compile("")) -> Iterator[tuple[str, str]]:
    """Yield the strings of the files that have `hint`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            where, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
            if not hint.search(source):
                continue
            tree = ast.parse(source)
            nodes = list(ast.walk(tree))
            apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    apart.update(id(part) for part in node.values)
                    yield (
                        where,
                        "".join(
                            str(part.value) if isinstance(part, ast.Constant) else _filled_in(part)
                            for part in node.values
                        ),
                    )
            for node in nodes:
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
                    yield where, node.value


def _filled_in(part: ast.expr) -> str:
    """Return what stands for a value in an f-string: the folder of runs itself, or {}."""
    name = part.value.id if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) else ""
    return str(RUNS) if name == "RUNS" else "{}"


def commands() -> list[Advice]:
    """Return all commands, each once for a place."""
    return list(dict.fromkeys((*of_pages(), *of_sources())))


def command_names() -> list[str]:
    """Return what can stand behind ``python -m``."""
    return [
        *(f"mpillm {name}" for name in COMMANDS if name != "bench"),
        *(f"mpillm bench {name}" for name in BENCHES),
        *(f"benchmarks {name}" for name in LABORATORY),
    ]
