"""`make install`: which build of PyTorch it takes, and what it prints while pip works."""

from __future__ import annotations

import io
import os
import re
import subprocess
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


def test_the_size_is_printed_before_pip_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """stdout has the requirement alone, which `make` gives to pip."""
    assert torch_build.main({torch_build.pinned(): _CUDA}.get) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{torch_build.pinned()}\n"
    assert printed.err.startswith("Installing into .venv: 5.3 GB") and "CUDA" in printed.err


class _Pip:
    """A process that is still there at the first looks. Before each of them, a file gets a size, in MB."""

    returncode = 0

    def __init__(self, file: Path, sizes: list[int]) -> None:
        self._file, self._sizes = file, sizes

    def poll(self) -> int | None:
        if not self._sizes:
            return 0
        if (size := self._sizes.pop(0)) > 0:
            with self._file.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, size << 20)
        return None


def test_lines_of_large_files_and_sizes_that_grow_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = io.StringIO(
        "Collecting torch\n  Downloading torch-2.13.0-cp311-linux.whl (888.1 MB)\n"
        "  Downloading six-1.whl (11 kB)\n"
        "  Downloading all-1.0-py3.whl (1.2 GB)\nInstalling collected packages: torch, six\n"
    )
    pip: Any = _Pip(tmp_path / "torch.so", [0, 20, 24])
    assert pip_install.follow(pip, output, tmp_path, look_s=0, size_s=0) == 0
    *lines, size = capsys.readouterr().out.splitlines()
    assert lines == [
        "  downloads torch-2.13.0, 888.1 MB",
        "  downloads all-1.0, 1.2 GB",
        "  unpacks 2 packages",
    ]
    assert re.fullmatch(rf"  0 s: 2[01] MB in {tmp_path}", size)  # a file system may need blocks of its own


def test_the_size_of_a_folder_whose_files_come_and_go(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """pip renames the files of bytecode that it writes: du reports an error for one that is gone."""
    (tmp_path / "kept").write_bytes(bytes(3 << 20))
    churn = (
        "import os, sys\n"
        "names = [os.path.join(sys.argv[1], str(i)) for i in range(1000)]\n"
        "while True:\n"
        "    for act in (lambda name: open(name, 'w').close(), os.unlink):\n"
        "        for name in names: act(name)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", churn, str(tmp_path)])
    try:
        assert all(pip_install.megabytes(tmp_path) >= 3 for _ in range(40))
    finally:
        process.kill()
        process.wait()
    assert capfd.readouterr().err == ""
    with pytest.raises(OSError, match="no such folder"):
        pip_install.megabytes(tmp_path / "no such folder")


def test_a_failure_prints_all_that_pip_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pip_install.main(["--no-index", "no-such-package-anywhere"], tmp_path) == 1
    assert "No matching distribution found for no-such-package-anywhere" in capsys.readouterr().err
