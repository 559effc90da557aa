"""Runs that lose ranks: options, samples, signals, and checks of the losses that a run reports."""

from __future__ import annotations

import json
import os
import signal

from tests.helpers.support import (
    Command,
    Ended,
    Samples,
)

OUTPUT = 24
GRACE: list[object] = ["--grace", 1.5]
TEST: list[object] = ["--test_mode", "AccuracyOnly", "--max_output_len", OUTPUT, "--save_outputs"]
# 64 samples, at most 4 at a time per instance: a test of some seconds
PACE: list[object] = ["--core_options", "ttft_ms:20,tpot_ms:6,kv_bytes_per_token:512", "--max_batch_size", 4]
SPREAD: list[object] = ["--mode", "disaggregated", "--num_ctx_servers", 2, "--num_gen_servers", 2]


def signal_rank(command: Command, rank: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process of a rank that has joined."""
    ranks = json.loads((command.log_dir / "ranks.json").read_text())
    os.kill(next(entry["pid"] for entry in ranks if entry["rank"] == rank), number)


def check_losses(ended: Ended, instances: list[int]) -> None:
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


def run_words(few: Samples, policy: str) -> list[object]:
    words = ["run", "--dataset_path", few.path, *TEST, *EXECUTORS, "--control_ranks", 2]
    words += ["--heartbeat_timeout", 10, "--grace", 3]
    return [*words, "--on_instance_loss", policy]
