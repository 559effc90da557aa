"""What a shell offers while a command is typed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpillm.cli import COMMANDS, main


def offered(line: str, folder: Path) -> set[str]:
    """Return the words offered at the end of a line, requested as by argcomplete's shell code."""
    answer = folder / "answer"
    environment = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }
    subprocess.run(
        [sys.executable, "-m", "mpillm"],
        env={**os.environ, **environment},
        cwd=folder,
        timeout=120,
        check=False,
        capture_output=True,
    )
    return {word.strip() for word in answer.read_text().split("\n")} if answer.exists() else set()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mpillm find-", {"find-max-qps"}),
        ("mpillm run --max_batch", {"--max_batch_size"}),
        ("mpillm run --max-batch", {"--max_batch_size"}),
        ("mpillm run --mode disagg", {"disaggregated"}),
        ("mpillm mpirun -n 4 run --mode dis", {"disaggregated"}),
        ("mpillm mpirun -n 4 doc", {"doctor"}),
        ("mpillm sbatch --nodes 2 -- serve --port", {"--port"}),
        ("mpillm sbatch --container_i", {"--container_image"}),
        ("mpillm bench rout", {"routing"}),
        ("mpillm bench routing --control_r", {"--control_ranks"}),
        ("mpillm completion ba", {"bash"}),
        ("mpillm ab '--max_batch_size 1' '--max_batch_size 2' --pai", {"--pairs"}),
        ("mpillm rubbish --x", set()),
    ],
)
def test_what_is_offered(line: str, expected: set[str], tmp_path: Path) -> None:
    assert offered(line, tmp_path) == expected


def test_all_commands_are_offered(tmp_path: Path) -> None:
    assert offered("mpillm ", tmp_path) == set(COMMANDS)


def test_a_shell_takes_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    code = capsys.readouterr().out
    bash = shutil.which("bash")
    assert bash is not None
    completed = subprocess.run(
        [bash, "-c", f"{code}\ncomplete -p mpillm"], capture_output=True, text=True, timeout=300, check=True
    )
    assert "_python_argcomplete" in completed.stdout
    assert main(["completion", "csh"]) == 2
