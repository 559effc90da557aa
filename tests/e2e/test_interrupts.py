"""Ctrl-C in a terminal, as a person presses it: one message that says so, in every way to start a run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.support import Starter

ENDLESS: list[object] = [
    "--core_type",
    "dummy",
    "--scenarios",
    "Server",
    "--server_target_qps",
    50,
    "--min_duration",
    100,
]


@pytest.mark.smoke
def test_in_the_test(both: Starter) -> None:
    command = both.start(3, *ENDLESS, controlling=True)
    command.wait_phase("test")
    command.press_ctrl_c()
    ended = command.end().must(130)
    assert "mpillm mpirun: Ctrl-C: stopping the ranks" in ended.err
    assert ended.message.startswith("mpillm: interrupted (Ctrl-C) in phase 'test'\n  see ")
    assert (ended.out + ended.err).count("interrupted") == 1 and "SIG" not in ended.out + ended.err
    assert ended.result["exit_code"] == 130 and ended.result["failures"][0]["cause"] == "interrupted (Ctrl-C)"


def test_before_mpi_is_there(both: Starter) -> None:
    command = both.start(3, *ENDLESS, controlling=True)
    command.wait_rank(0)
    command.press_ctrl_c()
    ended = command.end().must(130)
    assert (ended.out + ended.err).count("interrupted (Ctrl-C)") == 1, repr(ended)


@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_under_a_plain_mpirun_of_open_mpi(both: Starter, tmp_path: Path) -> None:
    """It drops what its ranks print from then on, so they write to its terminal; it always returns 1.

    It kills them half a second later, so a machine that stalls for so long gets another chance.
    """
    for attempt in range(3):
        log_dir = tmp_path / f"run_{attempt}"
        command = both.plain(
            3,
            both.python,
            "-m",
            "mpillm",
            "run",
            *ENDLESS,
            "--log_dir",
            log_dir,
            controlling=True,
            log_dir=log_dir,
        )
        command.wait_phase("test")
        command.press_ctrl_c()
        ended = command.end(tidy=False).must(1)
        if "interrupted" in ended.out:
            break
    assert (
        ended.out.count("mpillm: interrupted (Ctrl-C, or a signal to mpirun) in phase 'test'\n  see ") == 1
    ), repr(ended)
    assert "interrupted" not in ended.err


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_under_a_plain_mpirun_of_mpich(both: Starter, tmp_path: Path) -> None:
    """It kills the ranks that are left when the first has ended, and returns that one's code, or the
    signal."""
    program = [both.python, "-m", "mpillm", "run", *ENDLESS, "--log_dir", tmp_path / "run"]
    command = both.plain(3, *program, controlling=True)
    command.wait_phase("test")
    command.press_ctrl_c()
    ended = command.end(tidy=False)
    assert ended.code in (130, signal.SIGKILL), repr(ended)
    assert ended.message.startswith("mpillm: interrupted (Ctrl-C) in phase 'test'\n  see ")
    assert ended.result["exit_code"] == 130


def test_of_a_harness(one: Starter, tmp_path: Path) -> None:
    """The harness passes the signal on as it is, and starts no further test."""
    options = [
        "--scenarios=Server,Offline",
        *ENDLESS[:2],
        *ENDLESS[4:],
        "--world_size",
        3,
        "--log_dir",
        tmp_path / "tests",
    ]
    command = one.command(
        [one.python, "-m", "mpillm", "run-harness", *options],
        log_dir=tmp_path / "tests" / "dummy-Server",
        controlling=True,
    )
    command.wait_phase("test")
    command.press_ctrl_c()
    ended = command.end().must(130)
    assert ended.message.startswith("mpillm: interrupted (Ctrl-C) in phase 'test'\n  see ")
    assert (ended.out + ended.err).count("interrupted") == 1 and ended.out.count("\n=== ") == 1
