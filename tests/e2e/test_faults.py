"""Cores that fail: an exit code, one message that names the cause and the rank, an end in time, and nothing
left behind. Beside it: test_faults_input, test_faults_ranks, test_faults_disks.

(`Command.end` asserts the last two for every test: no process is left, and it fails when its own limit
passes.)
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.failures import ENDLESS, GRACE, GRACE_S, START_S, check_failure
from tests.helpers.support import (
    DONE,
    NOT_READY,
    ROOT,
    TEST_FAILED,
    Starter,
)

# --- a core that raises, answers twice, or never ---


@pytest.mark.parametrize(
    ("mpi", "phase", "code"),
    [("openmpi", phase, NOT_READY) for phase in ("join", "load", "warmup")]
    + [pytest.param("openmpi", "health", NOT_READY, marks=pytest.mark.slow)]  # as load
    + [("openmpi", "test", TEST_FAILED), ("mpich", "load", NOT_READY), ("mpich", "test", TEST_FAILED)],
    indirect=["mpi"],
)
def test_a_core_that_raises(both: Starter, phase: str, code: int) -> None:
    ended = both.run(4, *GRACE, "--core_options", f"fault:raise,fault_phase:{phase},fault_rank:3,fault_at:7")
    # The constructor runs when join has been released, which is when the others load.
    reported_phase = {"join": "load"}.get(phase, phase)
    check_failure(ended, code, "RuntimeError: injected fault in", rank=3, phase=reported_phase)
    assert "in _fault" in ended.message
    assert "injected fault" in (ended.log_dir / "ranks" / "rank_0003.log").read_text()
    assert [failure["rank"] for failure in ended.result["failures"]] == [3]


def test_a_core_that_raises_on_every_rank(one: Starter) -> None:
    """One message has the cause once."""
    ended = one.run(5, *GRACE, "--core_options", "fault:raise,fault_phase:load")
    check_failure(ended, NOT_READY, "RuntimeError: injected fault in load")
    assert "\n  ranks 1-4: RuntimeError" in ended.message
    assert ended.err.count("RuntimeError: injected") == 1 + 1  # the cause, and the last line of its traceback


@pytest.mark.parametrize("rank", [1, 2])
def test_a_context_or_generation_core_that_raises_in_the_test(one: Starter, rank: int) -> None:
    ended = one.run(
        3, "--mode", "disaggregated", *GRACE, "--core_options", f"fault:raise,fault_rank:{rank},fault_at:20"
    )
    check_failure(ended, TEST_FAILED, "injected fault in the test, at request 20", rank=rank, phase="test")


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("ready", NOT_READY),
        ("answer", TEST_FAILED),
        ("handoff", TEST_FAILED),
        ("drain", TEST_FAILED),
        ("stop", TEST_FAILED),
    ],
)
def test_a_core_that_raises_elsewhere(one: Starter, where: str, code: int) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": f"{where}:raise:1"}
    ended = one.run(3, "--mode", "disaggregated", *GRACE, core="tests.helpers.plugin_cores:Faulty", env=env)
    check_failure(ended, code, f"ValueError: broken in {where}", rank=1)


@pytest.mark.smoke
def test_a_package_that_rank_0_lacks(both: Starter, tmp_path: Path) -> None:
    """The other ranks do not wait for it until the deadline, and are not blamed."""
    (tmp_path / "mlperf_loadgen.py").write_text("raise ModuleNotFoundError(name='mlperf_loadgen')\n")
    ended = both.run(2, env={"PYTHONPATH": str(tmp_path)})
    assert ended.code != DONE
    assert re.search(r"mpillm: rank 0, \S+: the package 'mlperf_loadgen' is missing", ended.err + ended.out)
    assert "(--join_deadline" not in ended.err + ended.out


def test_a_core_that_answers_twice(one: Starter) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": "twice:raise:2"}
    ended = one.run(4, *GRACE, core="tests.helpers.plugin_cores:Faulty", env=env)
    check_failure(ended, TEST_FAILED, "answered twice")


@pytest.mark.parametrize(
    ("mpi", "mode", "rank"),
    [
        ("openmpi", "aggregated", 3),
        pytest.param("openmpi", "disaggregated", 2, marks=pytest.mark.slow),
        ("openmpi", "disaggregated", 3),
        ("mpich", "aggregated", 2),
    ],
    indirect=["mpi"],
)
def test_a_core_that_never_answers(both: Starter, mode: str, rank: int) -> None:
    options = [
        "--mode",
        mode,
        "--stall_timeout",
        1.5,
        *GRACE,
        "--core_options",
        f"fault:silent,fault_rank:{rank},fault_at:9",
    ]
    ended = both.run(4, *options, "--control_ranks", 2)
    check_failure(
        ended,
        TEST_FAILED,
        "sent nothing for 1.5 s (--stall_timeout); open requests: 1",
        rank=rank,
        phase="test",
        within=START_S + 1.5,
    )


def test_a_slow_core_is_no_failure(one: Starter) -> None:
    options = [
        "--core_options",
        "fault:slow,fault_rank:2,fault_at:3,fault_s:1.5",
        "--stall_timeout",
        10,
        *GRACE,
    ]
    assert one.run(3, *options).must(DONE).result["status"] == "VALID"


# --- a rank that hangs: the phase's deadline ends the run ---


@pytest.mark.parametrize(
    ("mpi", "phase", "code"),
    [
        pytest.param("openmpi", "join", NOT_READY, marks=pytest.mark.slow),
        ("openmpi", "load", NOT_READY),
        pytest.param("openmpi", "health", NOT_READY, marks=pytest.mark.slow),
        ("openmpi", "warmup", NOT_READY),
        ("openmpi", "test", TEST_FAILED),
        pytest.param("mpich", "load", NOT_READY, marks=pytest.mark.slow),
        ("mpich", "test", TEST_FAILED),
    ],
    indirect=["mpi"],
)
def test_a_core_that_hangs(both: Starter, phase: str, code: int) -> None:
    reported_phase = {"join": "load"}.get(phase, phase)
    options = [
        f"--{reported_phase}_deadline",
        2,
        *GRACE,
        "--core_options",
        f"fault:hang,fault_phase:{phase},fault_rank:3",
    ]
    ended = both.run(4, *options)
    # Who, for how long, and where: the stack of the rank's main thread.
    causes = [f"phase '{reported_phase}' missed its deadline of 2 s", "stuck for", "in _fault", "time.sleep"]
    check_failure(ended, code, *causes, rank=3, phase=reported_phase, within=START_S + 2 + GRACE_S)
    if phase != "test":  # in the test the harness waits for the answers, and is late too
        assert [failure["rank"] for failure in ended.result["failures"]] == [3]
    assert (
        "stopped while the main thread was stuck" in (ended.log_dir / "ranks" / "rank_0003.log").read_text()
    )


@pytest.mark.parametrize(
    ("phase", "code"), [("ready", NOT_READY), ("drain", TEST_FAILED), ("stop", TEST_FAILED)]
)
def test_a_core_that_hangs_late(one: Starter, phase: str, code: int) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": f"{phase}:hang:2"}
    ended = one.run(4, f"--{phase}_deadline", 2, *GRACE, core="tests.helpers.plugin_cores:Faulty", env=env)
    causes = [f"phase '{phase}' missed its deadline of 2 s", "in _at", "time.sleep"]
    check_failure(ended, code, *causes, rank=2, phase=phase, within=START_S + 2 + GRACE_S)


INLINE_TASK = """
import threading

from mpillm.comms.loop import EventLoop
from mpillm.cores.dummy import DummyCore

ask = EventLoop.run_inline_or_wake


def ask_to_fail(loop):
    loop.inline_tasks.insert(0, fail)
    ask(loop)


def fail():
    raise ValueError("broken in " + threading.current_thread().name)


EventLoop.run_inline_or_wake = ask_to_fail


class Core(DummyCore):
    pass
"""


def test_an_error_while_loadgens_thread_sends(both: Starter) -> None:
    """It does the main thread's work while that sleeps, and the main thread ends the run."""
    (both.folder / "inline_tasks.py").write_text(INLINE_TASK)
    env = {"PYTHONPATH": f"{both.folder}:{ROOT}"}
    ended = both.run(3, *ENDLESS, core="inline_tasks:Core", env=env)
    check_failure(ended, TEST_FAILED, "ValueError: broken in mpillm-loadgen", rank=0, phase="test")
