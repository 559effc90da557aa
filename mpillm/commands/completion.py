"""``python -m mpillm completion SHELL``: shell code that completes commands and options."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from launch.launcher import RANK_COMMANDS
from mpillm.errors import ExitCode, needs_extra
from mpillm.options.command_line import Parser, underscored

SHELLS = ("bash", "zsh", "fish")
_START_OTHERS = ("mpirun", "sbatch")


def main(argv: Sequence[str]) -> int:
    """Print the shell's code."""
    parser = Parser(
        prog="mpillm completion",
        usage="python -m mpillm completion SHELL",
        description="Print the shell code that completes commands, options and their values of `mpillm`.",
        epilog='examples:\n  eval "$(mpillm completion bash)"        # in ~/.bashrc; zsh in ~/.zshrc\n'
        "  mpillm completion fish | source",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    shell = parser.parse_args(argv).shell
    with needs_extra("completion", "completion"):
        from argcomplete.shell_integration import shellcode
    print(shellcode(["mpillm"], shell=shell))
    return ExitCode.DONE


def complete(modules: Mapping[str, str]) -> NoReturn:
    """Write the completions of a shell's line, in argcomplete's variables, and end this process.

    `modules`: of the commands, by name. The command runs until it calls its parser.
    """
    import argcomplete
    from argcomplete.lexers import split_line

    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    _, prefix, _, args, _ = split_line(line, point)
    os.environ["COMP_LINE"] = line[: point - len(prefix)] + underscored(prefix) + line[point:]
    at = 1  # index of the command
    if len(args) > at and args[at] in _START_OTHERS:
        at = next((i for i in range(at + 1, len(args)) if args[i] in RANK_COMMANDS), at)
    if len(args) <= at:
        _offer(modules, len(args))
    name = args[at].replace("_", "-")
    if name == "mpirun":
        _offer(RANK_COMMANDS, len(args))
    if name not in modules:
        raise SystemExit(ExitCode.USAGE)
    start = at + 1
    command = importlib.import_module(modules[name])
    if (names := getattr(command, "NAMES", None)) is not None:  # its first word is one of these
        start += 1
        if len(args) < start:
            _offer(names, len(args))
    os.environ["_ARGCOMPLETE"] = str(start)
    parse = argparse.ArgumentParser.parse_known_args

    def answer(parser: argparse.ArgumentParser, *_: Any) -> Any:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
        argcomplete.autocomplete(parser)

    argparse.ArgumentParser.parse_known_args = answer  # type: ignore[method-assign, assignment]
    command.main(args[at + 1 :])
    raise SystemExit(ExitCode.USAGE)


def _offer(names: Collection[str], start: int) -> NoReturn:
    """Write `names` as completions. `start`: the number of arguments before them."""
    import argcomplete

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("name", choices=sorted(names))
    os.environ["_ARGCOMPLETE"] = str(start)
    argcomplete.autocomplete(parser)
    raise SystemExit(ExitCode.USAGE)
