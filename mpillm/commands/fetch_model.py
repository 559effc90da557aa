"""``python -m mpillm fetch-model``"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError, nearest
from mpillm.data.fetch import DEFAULT_MODELS_DIR, MODELS, fetch_model
from mpillm.errors import ExitCode


def main(argv: Sequence[str]) -> int:
    """Fetch the model, and print its folder as the last line."""
    parser = argparse.ArgumentParser(
        prog="python -m mpillm fetch-model",
        description="Fetch a real model, or convert a GGUF file, and print its folder on the last line.",
        epilog=f"models: {', '.join(sorted(MODELS))}",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", help="which model, or a GGUF file")
    parser.add_argument(
        "--models_dir",
        "--models-dir",
        type=Path,
        metavar="DIR",
        help=f"where its folder goes (default: {DEFAULT_MODELS_DIR})",
    )
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}{nearest(unknown[0], ['--models_dir', '--help'])}")
    if arguments.name is None:
        raise ConfigError(f"fetch-model: which model? There are: {', '.join(sorted(MODELS))}")
    print(fetch_model(arguments.name, arguments.models_dir))
    return ExitCode.DONE
