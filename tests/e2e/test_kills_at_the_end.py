"""SIGKILL of each kind of rank after the last sample: while reports are gathered, cores stop, and MPI ends
(make test-kills)."""

from __future__ import annotations

import pytest

from tests.helpers.answers import check_answers
from tests.helpers.holds import GO, HELD, HOLD, VICTIM
from tests.helpers.instance_loss import (
    EXECUTORS,
    GRACE,
    KINDS,
    N_SAMPLES,
    OUTPUT,
    PAIRS,
    TEST,
    check_losses,
    signal_rank,
)
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    Command,
    Ended,
    Samples,
    Starter,
    wait_until,
)

pytestmark = pytest.mark.slow

FOLLOWERS = {
    "a follower": (5, [*EXECUTORS, "--tensor_parallelism", 2], 2, 0),
    "a generation instance's follower": (7, [*PAIRS, "--gen_tp_size", 2], 4, 2),
}
ALL = {**KINDS, **FOLLOWERS}


def start(one: Starter, few: Samples, kind: str, policy: str, env: dict[str, str]) -> Command:
    n, layout, _, _ = ALL[kind]
    options = [*TEST, *layout, *GRACE, "--dataset_path", few.path, "--on_instance_loss", policy]
    return one.start(n, *options, core=HELD, env=env)


def wait_for(command: Command, line: str) -> None:
    wait_until(lambda: f"\n  {line} " in command.out or command.process.poll() is not None, line)


def release(one: Starter) -> None:
    (one.folder / GO).touch()


@pytest.mark.parametrize("policy", ["fail", "continue"])
@pytest.mark.parametrize("phase", ["drain", "stop"])
@pytest.mark.parametrize("kind", ALL)
def test_killed_after_the_test(one: Starter, few: Samples, kind: str, phase: str, policy: str) -> None:
    """LoadGen's verdict stands, but not as the run's if a rank was needed that is lost."""
    n, _, victim, instance = ALL[kind]
    command = start(one, few, kind, policy, {HOLD: f"{phase}:{n - 1}"})
    wait_for(command, {"drain": "test", "stop": "drain"}[phase])
    signal_rank(command, victim)
    goes_on = policy == "continue" and instance is not None
    if goes_on:
        wait_for(command, "lost")
        release(one)
    ended = command.end()
    assert "Traceback" not in ended.err, ended
    if goes_on and instance is not None:
        check_answers(ended, [few.answer(i, OUTPUT) for i in range(N_SAMPLES)])
        check_losses(ended, [instance])
        assert [(lost["phase"], lost["retried"]) for lost in ended.result["lost"]] == [(phase, 0)]
        return
    ended.must(INSTANCE_LOST)
    check_failed(ended, phase)
    if victim == 0:
        assert "rank 0 ended without an exit code" in ended.err, ended
        return
    assert [failure["rank"] for failure in ended.result["failures"]] == [victim], ended
    assert f"in phase '{phase}'" in ended.message and "the process has ended" in ended.message
    assert f"rank {victim} (" in ended.message and "LoadGen's verdict on the test: VALID" in ended.message


def check_failed(ended: Ended, phase: str) -> None:
    """The run has failed, and its result.json says what LoadGen made of the test before."""
    result = ended.result
    assert (result["status"], result["phase"], result["exit_code"]) == ("FAILED", phase, INSTANCE_LOST), ended
    assert result["loadgen_result"] == "VALID", ended


@pytest.mark.parametrize("policy", ["fail", "continue"])
@pytest.mark.parametrize("place", ["free", "finalize", "in finalize"])
@pytest.mark.parametrize("kind", ALL)
def test_killed_while_mpi_ends(one: Starter, few: Samples, kind: str, place: str, policy: str) -> None:
    """All is done, and the result is written."""
    n, _, victim, _ = ALL[kind]
    if place == "in finalize":  # the last rank comes late, so that the others wait for it there
        command = start(one, few, kind, policy, {HOLD: f"finalize:{n - 1}"})
        wait_for(command, "page")
        signal_rank(command, victim)
        release(one)
    else:
        command = start(one, few, kind, policy, {VICTIM: f"{place}:{victim}"})
    ended = command.end()
    assert "Traceback" not in ended.err, ended
    check_answers(ended.must(DONE), [few.answer(i, OUTPUT) for i in range(N_SAMPLES)])
    assert ended.result["status"] == ended.result["loadgen_result"] == "VALID" and not ended.result["lost"]
    assert ended.out.count("\n  LoadGen ") == 1, ended
