"""--on_instance_loss: a rank is killed or stopped in the test; each sample is answered once all the same."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    ROOT,
    USAGE,
    Command,
    Ended,
    Samples,
    Starter,
    make_samples,
    wait_until,
)

OUTPUT = 24
GRACE: list[object] = ["--grace", 1.5]
CONTINUE: list[object] = ["--on_instance_loss", "continue", *GRACE]
TEST: list[object] = ["--test_mode", "AccuracyOnly", "--max_output_len", OUTPUT, "--save_outputs"]
# 64 samples, at most 4 at a time per instance: a test of some seconds
PACE: list[object] = ["--core_options", "ttft_ms:20,tpot_ms:6,kv_bytes_per_token:512", "--max_batch_size", 4]
SPREAD: list[object] = ["--mode", "disaggregated", "--num_ctx_servers", 2, "--num_gen_servers", 2]
AFTER_S = 0.7  # from LoadGen's start to the loss


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """64 prompts, some of which MPI does not send eagerly as KV caches."""
    return make_samples(tmp_path_factory.mktemp("data") / "few.jsonl", [1 + 37 * i % 293 for i in range(64)])


def signal_rank(command: Command, rank: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process of a rank that has joined."""
    ranks = json.loads((command.log_dir / "ranks.json").read_text())
    os.kill(next(entry["pid"] for entry in ranks if entry["rank"] == rank), number)


def wait_for_answers(command: Command, n: int) -> None:
    """Wait until outputs.jsonl has so many lines: work is under way everywhere."""
    outputs = command.log_dir / "outputs.jsonl"
    wait_until(
        lambda: (
            (outputs.exists() and outputs.read_bytes().count(b"\n") >= n)
            or command.process.poll() is not None
        ),
        f"{n} answers",
    )
    assert command.process.poll() is None, repr(command.end())


def check_answers(ended: Ended, expected: list[list[int]]) -> None:
    """LoadGen has the answer to each sample, once, and it is the one of an undisturbed run."""
    ended.must(DONE)
    answered = sorted(ended.accuracy_log())
    assert [index for index, _ in answered] == list(range(len(expected))), repr(ended)
    assert [tokens for _, tokens in answered] == expected
    assert len(ended.outputs()) == len(expected)


def check_told(ended: Ended, instances: list[int]) -> None:
    """The result and what is printed say plainly what was lost."""
    result = ended.result
    assert sorted(lost["instance"] for lost in result["lost"]) == instances
    assert result["retried"] == sum(lost["retried"] for lost in result["lost"])
    assert "not to be submitted" in ended.out
    for lost in result["lost"]:
        assert f"LOST                   instance {lost['instance']} " in ended.out, repr(ended)
        assert lost["cause"].splitlines()[0] in ended.out
        if lost["retried"]:
            assert 0 <= lost["recovered_after_s"] < result["test_s"]
    assert not ended.err.count("Traceback"), repr(ended)


def test_a_killed_executor(one: Starter, few: Samples) -> None:
    command = one.start(4, *TEST, *PACE, *CONTINUE, "--dataset_path", few.path)
    wait_for_answers(command, 8)
    signal_rank(command, 2)
    ended = command.end()
    check_answers(ended, [few.answer(i, OUTPUT) for i in range(64)])
    check_told(ended, [1])
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
    check_told(ended, [0, 3])


def test_an_instance_that_fails_after_the_test(one: Starter, few: Samples) -> None:
    """It owes nothing any more: the run ends well, and says so."""
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": "stop:raise:1"}
    core = "tests.helpers.plugin_cores:Faulty"
    ended = one.run(3, *TEST, *CONTINUE, "--dataset_path", few.path, core=core, env=env)
    check_answers(ended, [few.answer(i, OUTPUT) for i in range(64)])
    check_told(ended, [0])
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
