"""``python -m mpillm sbatch``: `launch.sbatch`, which itself knows no options of other commands.

What is wrong behind -- is said at once, not by a job that has waited for its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launch import sbatch
from mpillm.commands import find_max_qps, run_harness
from mpillm.config.options import RUN_FIELDS, parse_run, parse_serve
from mpillm.configurator.command_line import Parser, add_fields
from mpillm.fields import FIELDS

_PARSE: dict[str, Callable[[Sequence[str]], Any]] = {
    "run": parse_run,
    "serve": parse_serve,
    "run-harness": run_harness.parse,
    "find-max-qps": find_max_qps.parse,
}


def main(argv: Sequence[str]) -> int:
    """Do what `launch.sbatch.main` does."""
    return sbatch.main(argv, check)


def check(command: Sequence[str], has_files: bool) -> None:
    """Raise ConfigError for options that the command will refuse; without its files, for unknown ones."""
    name, *words = command
    name = name.replace("_", "-")
    if (parse := _PARSE.get(name)) is None or {"-h", "--help"} & {*words}:
        return
    if has_files:
        parse(words)
    elif parse in (parse_run, parse_serve):
        parser = Parser(prog=f"mpillm {name}")
        add_fields(parser, FIELDS, RUN_FIELDS)
        parser.texts(words)
