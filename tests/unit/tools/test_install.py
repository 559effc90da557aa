"""`make install`: which build of PyTorch it takes, and what it prints while pip works."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import pip_install, torch_build

_CPU = {"requires_dist": ["filelock", "sympy>=1.13.3"]}
_CUDA = {"requires_dist": ["filelock", 'nvidia-cudnn-cu13==9.20; platform_system == "Linux"']}


@pytest.mark.parametrize(
    ("files", "has_driver", "chosen"),
    [
        ({"torch==2.13.0+cpu": _CPU, "torch==2.13.0": _CUDA}, False, ("torch==2.13.0+cpu", "cpu")),
        ({"torch==2.13.0+cpu": _CPU, "torch==2.13.0": _CUDA}, True, ("torch==2.13.0", "cuda")),
        ({"torch==2.13.0": _CUDA}, False, ("torch==2.13.0", "cuda")),
        ({"torch==2.13.0": _CPU}, False, ("torch==2.13.0", "cpu")),  # of macOS, or an ARM machine
        ({}, False, ("torch==2.13.0", "cpu")),
    ],
)
def test_the_build_for_cpus_where_there_is_one(
    files: dict[str, Any], has_driver: bool, chosen: tuple[str, str]
) -> None:
    assert torch_build.choose("torch==2.13.0", files.get, has_driver) == chosen


def test_the_size_is_printed_before_pip_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stdout has the requirement alone, which `make` gives to pip."""
    monkeypatch.setattr(torch_build, "resolve", {torch_build.pinned(): _CUDA}.get)
    assert torch_build.main() == 0
    printed = capsys.readouterr()
    assert printed.out == f"{torch_build.pinned()}\n"
    assert printed.err.startswith("Installing into .venv: 5.3 GB") and "CUDA" in printed.err


class _Pip:
    """A process that is still there at the first looks."""

    returncode = 0

    def __init__(self, looks: int) -> None:
        self._left = looks

    def poll(self) -> int | None:
        self._left -= 1
        return None if self._left >= 0 else 0


def test_lines_of_large_files_and_sizes_that_grow_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = iter([20, 20, 900, 905])
    monkeypatch.setattr(pip_install, "megabytes", lambda: next(sizes))
    monkeypatch.setattr(pip_install, "_LOOK_S", 0)
    monkeypatch.setattr(pip_install, "_SIZE_S", 0)
    output = io.StringIO(
        "Collecting torch\n  Downloading torch-2.13.0-cp311-linux.whl (888.1 MB)\n"
        "  Downloading six-1.whl (11 kB)\n"
        "  Downloading all-1.0-py3.whl (1.2 GB)\nInstalling collected packages: torch, six\n"
    )
    pip: Any = _Pip(looks=3)
    assert pip_install.follow(pip, output) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  downloads torch-2.13.0, 888.1 MB",
        "  downloads all-1.0, 1.2 GB",
        "  unpacks 2 packages",
        f"  0 s: 900 MB in {sys.prefix}",
    ]


def test_a_failure_prints_all_that_pip_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert pip_install.main(["--no-index", "no-such-package-anywhere"]) == 1
    assert "No matching distribution found for no-such-package-anywhere" in capsys.readouterr().err
