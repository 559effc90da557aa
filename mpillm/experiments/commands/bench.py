"""``python -m mpillm bench NAME``: run a benchmark."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from disagg.errors import ConfigError, nearest
from mpillm.core_names import package_of, provided
from mpillm.errors import ExitCode
from mpillm.options.columns import indented
from mpillm.options.command_line import Parser

NAMES = BENCHES = provided("BENCHES")  # NAMES: for completion


def module_of(name: str) -> str:
    """Return the module of a benchmark."""
    file = name.replace("-", "_")
    return f"{package_of('BENCHES', name, 'mpillm.experiments')}.bench.bench_{file}"


def main(argv: Sequence[str]) -> int:
    """Run the named benchmark with the remaining arguments."""
    from mpillm.options.values import collect

    named = find("mpillm bench", BENCHES, module_of, argv, figures=True)
    if named is None:
        return ExitCode.DONE
    bench, parser, args = named
    if hasattr(bench, "normalize_args"):  # accepts a script's arguments
        args = bench.normalize_args(args)
    return int(bench.main(collect(args, bench.Options, parser)))


def find(
    prog: str,
    benches: Mapping[str, str],
    module_of: Callable[[str], str],
    argv: Sequence[str],
    figures: bool = False,
) -> tuple[ModuleType, Parser, list[str]] | None:
    """Return the module of the benchmark that `argv` names, its parser, and the remaining arguments.

    Prints the list of benchmarks and returns None for --help. Raises ConfigError for an unknown name.

    Args:
        module_of: Returns the module name of a benchmark.
        figures: The benchmarks report figures for --json.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: python -m {prog} NAME [options]\n")
        width = max(map(len, benches))
        for name, description in benches.items():
            print(indented(f"  {name:<{width}}  ", description))
        return None
    if argv[0] not in benches:
        raise ConfigError(
            f"no benchmark '{argv[0]}'{nearest(argv[0], benches)}; there are: {', '.join(benches)}"
        )
    name, *args = argv
    bench = importlib.import_module(module_of(name))
    parser = Parser(
        prog=f"{prog} {name}", description=bench.DESCRIPTION, epilog=bench.EPILOG, figures=figures
    )
    return bench, parser, args
