"""Random kills: any rank, at any moment, with fail and with continue (make test-kills).

MPILLM_KILLS is the number of rounds (20), MPILLM_KILLS_SEED the first one's seed (0).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.answers import check_answers
from tests.helpers.instance_loss import GRACE, N_SAMPLES, OUTPUT, PACE, SPREAD, check_losses
from tests.helpers.make_checkpoint import make_checkpoint
from tests.helpers.support import (
    CHUNKED,
    DONE,
    INSTANCE_LOST,
    TEST_FAILED,
    Command,
    Ended,
    Samples,
    Starter,
)

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("MPILLM_KILLS", "20"))
SEED = int(os.environ.get("MPILLM_KILLS_SEED", "0"))
# No shorter heartbeat: eight ranks that import torch on two busy cores were silent for 15 s.
HANG: list[object] = ["--stall_timeout", 10]
TORCH: list[object] = ["--dtype", "float32", "--num_threads", 1, "--max_seq_len", 512, *CHUNKED]


@dataclass(frozen=True)
class Layout:
    """Describes a run: its number of ranks, options, and the ranks of its instances, by kind."""

    n_ranks: int
    options: list[object]
    kinds: list[list[list[int]]]
    core: str = "dummy"


LAYOUTS = {
    "aggregated": Layout(4, PACE, [[[1], [2], [3]]]),
    "disaggregated": Layout(5, [*PACE, *SPREAD], [[[1], [2]], [[3], [4]]]),
    "torch": Layout(4, [*TORCH, "--control_ranks", 2, "--max_batch_size", 4], [[[2], [3]]], "torch"),
    "torch TP": Layout(
        8, [*TORCH, "--max_batch_size", 4, "--tensor_parallelism", 3], [[[2, 3, 4], [5, 6, 7]]], "torch"
    ),
    "torch disaggregated": Layout(
        6, [*TORCH, *SPREAD, "--max_batch_size", 4], [[[2], [3]], [[4], [5]]], "torch"
    ),
    "torch disaggregated TP": Layout(
        8,
        [
            *TORCH,
            *("--mode", "disaggregated", "--num_ctx_servers", 3, "--num_gen_servers", 1, "--gen_tp_size", 3),
            *("--max_batch_size", 4),
        ],
        [[[2], [3], [4]], [[5, 6, 7]]],
        "torch",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, few: Samples, model: Path
) -> dict[str, list[list[int]]]:
    """Return the answers of runs that nobody disturbs, by core."""
    starter = Starter("openmpi", tmp_path_factory.mktemp("undisturbed"))
    options = [*test_options(few, "Offline"), *TORCH, "--model_path", model]
    ended = starter.run(3, *options, core="torch").must(DONE)
    return {
        "dummy": [few.answer(i, OUTPUT) for i in range(N_SAMPLES)],
        "torch": [tokens for _, tokens in sorted(ended.accuracy_log())],
    }


def test_options(few: Samples, scenario: str) -> list[object]:
    return [
        *("--test_mode", "AccuracyOnly", "--max_output_len", OUTPUT, "--save_outputs", *GRACE),
        *("--dataset_path", few.path, "--scenarios", scenario),
        *(["--server_target_qps", 40] if scenario == "Server" else []),
    ]


test_options.__test__ = False  # type: ignore[attr-defined]


def wait_until_signalled(command: Command, phase: str, n_answers: int, extra_s: float) -> bool:
    """Wait for the moment; return whether the run still goes on."""
    outputs = command.log_dir / "outputs.jsonl"

    def is_time() -> bool:
        if phase == "start":
            return (command.log_dir / "ranks.json").exists()
        if phase == "test":
            return outputs.exists() and outputs.read_bytes().count(b"\n") >= n_answers
        return "\n  test  " in command.out and "answered" in command.out  # drain or stop

    end = time.monotonic() + 240  # eight ranks that import torch beside other load take minutes
    while not is_time() and command.process.poll() is None:
        assert time.monotonic() < end, repr(command.err)
        time.sleep(0.002)
    time.sleep(extra_s)
    return command.process.poll() is None


def send(command: Command, rank: int, number: int) -> bool:
    """Return whether the rank was still there."""
    ranks = json.loads((command.log_dir / "ranks.json").read_text())
    try:
        os.kill(next(entry["pid"] for entry in ranks if entry["rank"] == rank), number)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
def test_a_random_kill(
    one: Starter, few: Samples, model: Path, undisturbed: dict[str, list[list[int]]], seed: int
) -> None:
    chance = random.Random(seed)
    name = chance.choice([*LAYOUTS, "aggregated", "disaggregated"])
    layout = LAYOUTS[name]
    policy = chance.choice(["continue", "continue", "continue", "fail"])
    phase = chance.choice(["test"] * 5 + ["start", "end"])
    number = chance.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP])
    scenario = chance.choice(["Offline", "Server"])
    # Mostly one that can be spared, of any kind; sometimes two; sometimes harness or leader.
    kinds = [kind for kind in layout.kinds if len(kind) > 1]
    instance = chance.choice(chance.choice(kinds))
    victims = [chance.choice(instance)]
    if chance.random() < 0.15:
        victims = [chance.choice([0, 1])]
    elif chance.random() < 0.3:
        victims.append(chance.choice(chance.choice(chance.choice(layout.kinds))))
    victims = list(dict.fromkeys(victims))
    n_answers, extra_s = chance.randrange(N_SAMPLES * 3 // 4), chance.random() * 0.2
    description = (
        f"{name}, {policy}, {scenario}: {number.name} of {victims} in {phase} at {n_answers} + {extra_s:.3f}"
    )
    print(description)

    options = [*test_options(few, scenario), *layout.options, "--on_instance_loss", policy, *HANG]
    if layout.core == "torch":
        options += ["--model_path", model]
    command = one.start(layout.n_ranks, *options, core=layout.core)
    hit = []
    if wait_until_signalled(command, phase, n_answers, extra_s):
        hit = [rank for rank in victims if send(command, rank, number)]
    ended = command.end(120)
    check(ended, layout, policy, hit, undisturbed[layout.core], description)


def check(
    ended: Ended, layout: Layout, policy: str, hit: list[int], expected: list[list[int]], description: str
) -> None:
    """It ended well, or with the loss as its reason; nothing in between."""
    assert "Traceback" not in ended.err, f"{description}\n{ended!r}"
    owners = {
        rank: (kind, i)
        for kind, instances in enumerate(layout.kinds)
        for i, instance in enumerate(instances)
        for rank in instance
    }
    lost = {owners[rank] for rank in hit if rank in owners}
    spared = all(
        any((kind, i) not in lost for i in range(len(instances)))
        for kind, instances in enumerate(layout.kinds)
    )
    can_go_on = policy == "continue" and spared and len(hit) == sum(rank in owners for rank in hit)
    if ended.code == DONE:  # also if the loss came when everything was done
        check_answers(ended, expected)
        if ended.result["lost"]:
            assert policy == "continue", description
            check_losses(ended, sorted(one["instance"] for one in ended.result["lost"]))
        return
    assert ended.code in (INSTANCE_LOST, TEST_FAILED), f"{description}\n{ended!r}"
    before_test = "\n  ready  " not in ended.out
    assert hit and (before_test or not can_go_on), f"{description}\n{ended!r}"
    if 0 not in hit:
        assert ended.result["status"] == "FAILED"
        assert {failure["rank"] for failure in ended.result["failures"]} & set(hit), (
            f"{description}\n{ended!r}"
        )
