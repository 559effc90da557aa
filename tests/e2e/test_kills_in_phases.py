"""SIGKILL of each kind of rank in each phase, with fail and with continue (make test-kills)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest

from tests.e2e.test_instance_loss import (
    GRACE,
    OUTPUT,
    SPREAD,
    TEST,
    check_answers,
    check_told,
    signal_rank,
    wait_for_answers,
)
from tests.helpers.support import INSTANCE_LOST, NOT_READY, Command, Ended, Samples, Starter, make_samples

pytestmark = pytest.mark.slow

N_SAMPLES = 64
TIMES = "ttft_ms:20,tpot_ms:6,kv_bytes_per_token:512"
PAIRS = [*SPREAD, "--max_batch_size", 4]  # two context and two generation instances
EXECUTORS = ["--max_batch_size", 4]
KINDS: dict[str, tuple[int, list[object], int, int | None]] = {  # ranks, options, victim, its instance
    "harness and leader": (5, PAIRS, 0, None),
    "harness": (6, PAIRS, 0, None),
    "leader": (6, PAIRS, 1, None),
    "context": (6, PAIRS, 2, 0),
    "generation": (5, PAIRS, 3, 2),
    "executor": (3, EXECUTORS, 1, 0),
}
IN_MPI_INIT_S = 3.0  # by then the others are inside; if not, the case is one of "start"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    lengths = [1 + 37 * i % 293 for i in range(N_SAMPLES)]
    return make_samples(tmp_path_factory.mktemp("data") / "few.jsonl", lengths)


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
        check_told(ended, [instance])
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
