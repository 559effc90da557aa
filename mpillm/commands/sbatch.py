"""``python -m mpillm sbatch``: `launch.sbatch`, which itself knows no options of other commands.

What is wrong behind -- is said at once, not by a job that has waited for its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launch import sbatch
from mpillm.core_names import load_object, module_of
from mpillm.options.command_line import Parser, add_fields
from mpillm.options.fields import FIELDS
from mpillm.options.options import RUN_FIELDS, parse_run, parse_serve

_PARSE: dict[str, Callable[[Sequence[str]], Any]] = {"run": parse_run, "serve": parse_serve}
_OWN_PARSE = ("run-harness", "find-max-qps")  # their modules have one


def main(argv: Sequence[str]) -> int:
    """Do what `launch.sbatch.main` does."""
    return sbatch.main(argv, check)


def check(command: Sequence[str], has_files: bool) -> None:
    """Raise ConfigError for options that the command will refuse; without its files, for unknown ones."""
    name, *words = command
    name = name.replace("_", "-")
    if {"-h", "--help"} & {*words}:
        return
    if has_files and name in (*_PARSE, *_OWN_PARSE):
        parse = _PARSE.get(name) or load_object(f"{module_of(name)}:parse")
        parse(words)
    elif name in _PARSE:
        parser = Parser(prog=f"mpillm {name}")
        add_fields(parser, FIELDS, RUN_FIELDS)
        parser.texts(words)
