"""--on_instance_loss: a rank is killed or stopped in the test; each sample is answered once all the same."""

from __future__ import annotations

import pytest

from tests.helpers.answers import check_answers, wait_for_answers
from tests.helpers.instance_loss import GRACE, OUTPUT, PACE, SPREAD, TEST, check_losses, signal_rank
from tests.helpers.support import (
    INSTANCE_LOST,
    ROOT,
    USAGE,
    Samples,
    Starter,
    wait_until,
)

CONTINUE: list[object] = ["--on_instance_loss", "continue", *GRACE]
AFTER_S = 0.7  # from LoadGen's start to the loss


def test_a_killed_executor(one: Starter, few: Samples) -> None:
    command = one.start(4, *TEST, *PACE, *CONTINUE, "--dataset_path", few.path)
    wait_for_answers(command, 8)
    signal_rank(command, 2)
    ended = command.end()
    check_answers(ended, [few.answer(i, OUTPUT) for i in range(64)])
    check_losses(ended, [1])
    (lost,) = ended.result["lost"]
    assert (lost["rank"], lost["role"], lost["ranks"], lost["phase"]) == (2, "executor", [2], "test")
    assert 0 < lost["retried"] <= 8
    assert ended.result["cpu_cores"][2] is None


def test_a_killed_context_and_a_killed_generation_instance(one: Starter, few: Samples) -> None:
    """One is killed after the other; harness and leader have ranks of their own."""
    options = [*TEST, *PACE, *SPREAD, *CONTINUE, "--dataset_path", few.path]
    command = one.start(6, *options)
    wait_for_answers(command, 4)
    signal_rank(command, 2)
    wait_for_answers(command, 12)
    signal_rank(command, 5)
    ended = command.end()
    check_answers(ended, [few.answer(i, OUTPUT) for i in range(64)])
    check_losses(ended, [0, 3])


def test_an_instance_that_fails_after_the_test(one: Starter, few: Samples) -> None:
    """It owes nothing any more: the run ends well, and says so."""
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": "stop:raise:1"}
    core = "tests.helpers.plugin_cores:Faulty"
    ended = one.run(3, *TEST, *CONTINUE, "--dataset_path", few.path, core=core, env=env)
    check_answers(ended, [few.answer(i, OUTPUT) for i in range(64)])
    check_losses(ended, [0])
    (lost,) = ended.result["lost"]
    assert (lost["phase"], lost["retried"]) == ("stop", 0)
    assert "ValueError: broken in stop" in lost["cause"]


@pytest.mark.smoke
def test_the_last_instance_ends_the_run(one: Starter, few: Samples) -> None:
    command = one.start(3, *TEST, *PACE, *CONTINUE, "--dataset_path", few.path)
    wait_for_answers(command, 4)
    signal_rank(command, 1)
    wait_until(lambda: "\n  lost " in command.out, "rank 0 to know")
    signal_rank(command, 2)
    ended = command.end()
    ended.must(INSTANCE_LOST)
    assert "no other executor is left" in ended.message
    assert [failure["rank"] for failure in ended.result["failures"]] == [2]
    assert [lost["instance"] for lost in ended.result["lost"]] == [0]


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_an_mpi_that_does_not_outlive_a_rank(both: Starter) -> None:
    ended = both.run(4, *CONTINUE)
    ended.must(USAGE)
    assert "MPICH" in ended.message and "ULFM" in ended.message
