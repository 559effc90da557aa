"""``python -m tools.pip_install OPTIONS``: run pip install, with progress.

On a terminal, pip draws its own progress. Otherwise this prints the large files that pip downloads, and all
of pip's output if it fails. pip unpacks packages silently, so a line reports the size of the environment as
it grows.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_MIN_GROWTH_MB = 10
_LARGE_FILE = re.compile(r" *Downloading ([\w.]+-[\w.]+)\S* \((\d\d[\d.]* MB|[\d.]+ GB)\)")
_UNPACKS = "Installing collected packages: "


def main(argv: Sequence[str], environment: Path = Path(sys.prefix)) -> int:
    """Return pip's exit code. `environment`: the folder that grows, and has pip's log."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *argv]
    if sys.stdout.isatty():
        return follow(subprocess.Popen(command), None, environment)
    log = environment / "pip.log"
    with log.open("wb") as output, log.open(encoding="utf-8", errors="replace") as lines:
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        code = follow(pip, lines, environment)
    if code:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
    return code


def follow(
    process: subprocess.Popen[bytes],
    output: IO[str] | None,
    environment: Path,
    look_s: float = 1.0,
    size_s: float = 15.0,
) -> int:
    """Print the progress until the process ends; return its exit code.

    `output`: pip's log; `size_s`: between two lines about the size.
    """
    began, due, printed_mb, partial_line = time.monotonic(), size_s, megabytes(environment), ""
    while process.poll() is None:
        time.sleep(look_s)
        if output is not None:
            *lines, partial_line = (partial_line + output.read()).split("\n")
            for line in lines:
                if match := _LARGE_FILE.match(line):
                    print(f"  downloads {match[1]}, {match[2]}", flush=True)
                elif line.startswith(_UNPACKS):
                    print(f"  unpacks {line.count(',') + 1} packages", flush=True)
        if (now := time.monotonic() - began) > due:
            due = now + size_s
            if (mb := megabytes(environment)) > printed_mb + _MIN_GROWTH_MB:
                printed_mb = mb
                print(f"  {now:.0f} s: {mb:,} MB in {environment}", flush=True)
    return process.returncode


def megabytes(folder: Path) -> int:
    """Return the size of a folder in MB. Files may come and go meanwhile, as those of pip do."""
    # For a file that has gone, du fails. It prints the size of the others all the same.
    done = subprocess.run(["du", "-sm", str(folder)], capture_output=True, text=True)
    if not done.stdout:
        raise OSError(done.stderr.strip())
    return int(done.stdout.split()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
