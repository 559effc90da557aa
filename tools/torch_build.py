"""``python -m tools.torch_build``: print the requirement of PyTorch's build for `make install`.

This is the CPU build, if one of pip's sources has it and this machine has no NVIDIA driver. stderr gets the
size of the installation, which depends on the build: the CUDA build needs a dozen NVIDIA packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia")
# Size of .venv, measured with `du` at the version in constraints.txt.
_SIZES = {
    "cpu": "1.5 GB, one to three minutes, longer on a busy machine …",
    "cuda": "5.3 GB, five minutes or more, for the CUDA build of PyTorch …\n"
    "  (1.5 GB with its CPU build: name PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL)",
}

Resolve = Callable[[str], "Mapping[str, Any] | None"]
"""Returns the metadata of the file that pip finds for a requirement; None if there is none."""


def pinned() -> str:
    """Return the requirement of torch in constraints.txt."""
    lines = _CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def choose(pin: str, resolve: Resolve, has_driver: bool) -> tuple[str, str]:
    """Return the requirement for pip, and its build: cpu or cuda."""
    for requirement in [pin] if has_driver else [f"{pin}+cpu", pin]:
        if (metadata := resolve(requirement)) is not None:
            needs = metadata.get("requires_dist", ())
            return requirement, "cuda" if any("nvidia-" in need for need in needs) else "cpu"
    return pin, "cpu"


def resolve(requirement: str) -> Mapping[str, Any] | None:
    """Resolve a requirement with pip, which downloads only metadata if its source has them separately."""
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--quiet", "--report", "-"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    done = subprocess.run([*pip, *options, requirement], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if done.returncode:
        return None
    metadata: Mapping[str, Any] = json.loads(done.stdout)["install"][0]["metadata"]
    return metadata


def main(resolve: Resolve = resolve) -> int:
    """Print the requirement, and the size."""
    requirement, build = choose(pinned(), resolve, has_driver=_NVIDIA_DRIVER.exists())
    print(f"Installing into .venv: {_SIZES[build]}", file=sys.stderr, flush=True)
    print(requirement)
    return 0


if __name__ == "__main__":
    sys.exit(main())
