"""A rank's log file: it receives all that the rank prints, except rank 0's console."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from launch.environment import without_secrets


def open_rank_log(directory: Path, rank: int) -> Path:
    """Send logging to ``ranks/rank_NNNN.log``, and, unless this is rank 0, stdout and stderr.

    Raises OSError if the file can't be written.
    """
    path = directory / "ranks" / f"rank_{rank:04d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    words, _ = without_secrets(sys.argv)
    print(f"rank {rank}, pid {os.getpid()}: {' '.join(words)}", file=file, flush=True)
    if rank != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(
        stream=file, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    return path
