"""A second run in one Python process: MPI begins once."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.lone_mpi import run_program

PROGRAM = """
from mpillm.cli import main
words = ["run", "--core_type", "dummy", "--max_output_len", "2", "--log_dir"]
print([int(main([*words, "LOG_DIR" + name])) for name in ("/one", "/two")])
"""


def test_a_second_run_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """The error does not end the process."""
    ended = run_program(PROGRAM.replace("LOG_DIR", str(tmp_path)))
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == "[0, 2]", ended
    assert ended.stderr.startswith("mpillm: this Python process has ended MPI"), ended.stderr
    assert "subprocess.run" in ended.stderr and not (tmp_path / "two").exists()
