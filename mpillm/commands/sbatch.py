"""``python -m mpillm sbatch``: `launch.sbatch`, which is independent of other commands' options.

This command checks the options after -- before it submits the job.
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
    """Run `launch.sbatch.main` with a check of the command."""
    return sbatch.main(argv, check)


def check(command: Sequence[str], has_files: bool) -> None:
    """Raise ConfigError for wrong options of the command; without its files, only for unknown options."""
    name, *argv = command
    name = name.replace("_", "-")
    if {"-h", "--help"} & {*argv}:
        return
    if has_files and name in (*_PARSE, *_OWN_PARSE):
        parse = _PARSE.get(name) or load_object(f"{module_of(name)}:parse")
        parse(argv)
    elif name in _PARSE:
        parser = Parser(prog=f"mpillm {name}")
        add_fields(parser, FIELDS, RUN_FIELDS)
        parser.texts(argv)
