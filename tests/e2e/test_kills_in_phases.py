"""SIGKILL of each kind of rank in each phase, with fail and with continue (make test-kills)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest

from tests.helpers.answers import check_answers, wait_for_answers
from tests.helpers.instance_loss import (
    GRACE,
    KINDS,
    N_SAMPLES,
    OUTPUT,
    TEST,
    TIMES,
    check_losses,
    signal_rank,
)
from tests.helpers.support import INSTANCE_LOST, NOT_READY, Command, Ended, Samples, Starter

pytestmark = pytest.mark.slow

IN_MPI_INIT_S = 3.0  # by then the others are inside; if not, the case is one of "start"


def kill_in(command: Command, phase: str, victim: int, holder: int) -> None:
    """Kill a rank in a phase, which another one (`holder`) keeps from ending."""
    if phase == "start":
        os.kill(command.wait_rank(victim), signal.SIGKILL)
    elif phase == "join":
        held = command.wait_rank(holder)
        os.kill(held, signal.SIGSTOP)
        killed = command.wait_rank(victim)
        time.sleep(IN_MPI_INIT_S)
        os.kill(killed, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(held, signal.SIGCONT)
    elif phase == "test":
        wait_for_answers(command, 8)
        signal_rank(command, victim)
    else:
        command.wait_phase(phase)
        signal_rank(command, victim)


@pytest.mark.parametrize("policy", ["fail", "continue"])
@pytest.mark.parametrize("phase", ["start", "join", "load", "warmup", "test"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank(one: Starter, few: Samples, kind: str, phase: str, policy: str) -> None:
    n, layout, victim, instance = KINDS[kind]
    holder = n - 1
    hang = f",fault:hang,fault_phase:{phase},fault_rank:{holder}" if phase in ("load", "warmup") else ""
    options = [*TEST, *layout, *GRACE, "--core_options", TIMES + hang, "--dataset_path", few.path]
    command = one.start(n, *options, "--join_deadline", 15, "--on_instance_loss", policy)
    kill_in(command, phase, victim, holder)
    ended = command.end()
    assert "Traceback" not in ended.err, ended
    if phase == "test" and policy == "continue" and instance is not None:
        check_answers(ended, [few.answer(i, OUTPUT) for i in range(N_SAMPLES)])
        check_losses(ended, [instance])
    elif phase in ("start", "join"):
        check_named(ended, victim)
    elif victim == 0:
        ended.must(INSTANCE_LOST)
        assert "rank 0 ended without an exit code" in ended.err, ended
    else:
        ended.must(INSTANCE_LOST)
        assert [failure["rank"] for failure in ended.result["failures"]] == [victim], ended
        assert f"in phase '{phase}'" in ended.message and "the process has ended" in ended.message


def check_named(ended: Ended, victim: int) -> None:
    """Who was lost while MPI starts is named, by the ranks or by the launcher."""
    assert ended.code in (NOT_READY, INSTANCE_LOST), ended
    assert re.search(rf"\brank {victim}\b", ended.err), ended
