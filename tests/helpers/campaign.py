"""Rounds by seed: each in a folder of its own, with a line of JSON of how it ended."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any


def parser_of(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of what all campaigns take."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a file for lines of JSON")
    parser.add_argument("--keep", type=Path, help="a folder for the run directories of rounds that fell")
    return parser


def play_all(
    given: argparse.Namespace,
    of: Callable[[int], Any],
    play: Callable[[Any, Path], Mapping[str, Any]],
    name: str,
) -> int:
    """Play the rounds, print a line for each, and return the exit code: 1 if one fell.

    `of`: the round of a seed, a data class; `play`: return what is to be said of it, `how` it ended at least;
    AssertionError: not as it should.
    """
    fell = 0
    for seed in range(given.first, given.first + given.rounds):
        one, began = of(seed), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mpillm-", ignore_cleanup_errors=True) as folder:
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            found: Mapping[str, Any] = {"how": "FELL"}
            why = ""
            try:
                found = play(one, Path(folder))
            except Exception as error:  # noqa: BLE001 - the other seeds go on
                why = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
                fell += 1
                if given.keep and (run := Path(folder) / "run").exists():
                    shutil.copytree(run, given.keep / f"{name}-{seed}", dirs_exist_ok=True)
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
        line = {**asdict(one), **found, "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(line), flush=True)
        if why:
            print(why, flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(line | {"why": why}) + "\n")
    print(f"{given.rounds - fell} of {given.rounds} rounds ended as they should")
    return 1 if fell else 0


@contextmanager
def taken_cores(n: int) -> Iterator[None]:
    """Have `n` processes compute."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
