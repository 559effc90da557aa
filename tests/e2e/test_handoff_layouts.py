"""Greedy tokens equal those of transformers when context and generation instances differ in layout.

A lost rank is named.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import HANDOFF_SIZES, check_handoff, sections
from tests.helpers.support import CHUNKED, INSTANCE_LOST, ROOT, TEST_FAILED, Starter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mpillm.data.fetch import fetch_model  # noqa: E402
from tests.helpers.layouts import Answers, preset_answers, smollm2_answers  # noqa: E402
from tests.helpers.presets import save_preset  # noqa: E402 - needs torch

PLUGINS = {"PYTHONPATH": str(ROOT)}
# a context takes several steps: it is accepted before the last of them
SMALL_CHUNKS: list[object] = [*CHUNKED, "--max_num_tokens", 16]


def prompt_tokens(dataset: Path) -> int:
    return sum(len(json.loads(line)["input_tokens"]) for line in dataset.read_text().splitlines())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return preset_answers("tiny-llama", tmp_path_factory.mktemp("tiny-llama"), 12, 12)


@pytest.mark.parametrize(
    ("context", "generation"),
    [("tp2", "pp2"), ("pp2", "tp2pp2"), pytest.param("tp1", "tp4", marks=pytest.mark.slow)],
)
def test_layouts(one: Starter, tiny: Answers, context: str, generation: str) -> None:
    """Answers are right in small steps, and with blocks of different sizes at the two ends."""
    file = sections(
        one.folder / "run.yaml",
        HANDOFF_SIZES[context],
        HANDOFF_SIZES[generation],
        kv_cache_config={"tokens_per_block": 16},
    )
    ranks = sum(tp * pp for tp, pp, _ in (HANDOFF_SIZES[context], HANDOFF_SIZES[generation]))
    instances = check_handoff(one, "tiny-llama", tiny, file, ranks, *SMALL_CHUNKS, n_new=12)
    assert [instance["samples"] for instance in instances] == [len(tiny[1])] * 2
    # keys and values, layers, heads, values of 4 bytes
    assert instances[0]["kv_bytes"] == prompt_tokens(tiny[0]) * 2 * 6 * 4 * 16 * 4


def test_answers_that_end_with_their_first_token(one: Starter, tiny: Answers, tmp_path: Path) -> None:
    """Such requests were offered, and may have moved already.

    There is room for two at a time, so their ids and places are used again.
    """
    dataset, answers = tiny
    save_preset("tiny-llama", tmp_path / "model")
    ends = {257, answers[0][0], answers[5][0], answers[2][2]}  # 257: that of the model
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    expected = [
        tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), None)] for tokens in answers
    ]
    alone = sum(len(tokens) == 1 for tokens in expected)
    assert 2 <= alone < len(expected) - 4
    file = sections(one.folder / "run.yaml", HANDOFF_SIZES["pp2"], HANDOFF_SIZES["tp1"], n_generations=2)
    options = ["--max_batch_size", 2, "--kv_cache_tokens", 256, "--max_seq_len", 128]
    instances = check_handoff(
        one,
        tmp_path / "model",
        (dataset, expected),
        file,
        4,
        *SMALL_CHUNKS,
        *options,
        n_new=12,
    )
    assert instances[0]["samples"] == len(expected)
    assert instances[1]["samples"] + instances[2]["samples"] == len(expected) - alone


# --- failures ---


@pytest.mark.parametrize("rank", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_killed_follower(one: Starter, rank: int) -> None:
    """The message names a follower of a context or a generation instance that is killed while KV caches
    move."""
    file = sections(one.folder / "run.yaml", HANDOFF_SIZES["tp2"], HANDOFF_SIZES["pp2"])
    options = [
        "--scenarios",
        "Server",
        "--server_target_qps",
        100,
        "--min_duration",
        100,
        "--grace",
        3,
        "--num_threads",
        1,
        *CHUNKED,
    ]
    command = one.start(
        5,
        "--disagg_config",
        file,
        "--model_path",
        "tiny-llama",
        "--max_output_len",
        8,
        *options,
        core="torch",
    )
    pid = command.wait_rank(rank)
    command.wait_phase("test")
    os.kill(pid, signal.SIGKILL)
    ended = command.end().must(INSTANCE_LOST)
    role = "ctx, instance 0" if rank == 2 else "gen, instance 1"
    assert re.search(rf"\brank {rank} \({role}\), .*, pid {pid}: the process has ended", ended.message), repr(
        ended
    )


@pytest.mark.parametrize("rank", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_follower_that_raises_in_a_handoff(one: Starter, rank: int) -> None:
    file = sections(one.folder / "run.yaml", HANDOFF_SIZES["tp2"], HANDOFF_SIZES["pp2"])
    env = PLUGINS | {"MPILLM_TEST_RANK": str(rank)}
    options = [
        "--disagg_config",
        file,
        "--model_path",
        "tiny-llama",
        "--max_output_len",
        8,
        "--grace",
        3,
        "--num_threads",
        1,
        *CHUNKED,
    ]
    ended = one.run(5, *options, core="tests.helpers.plugin_torch_cores:FailingHandoff", env=env).must(
        TEST_FAILED
    )
    role = "ctx, instance 0" if rank == 2 else "gen, instance 1"
    assert re.search(rf"\brank {rank} \({role}\), .*: ValueError: broken in the handoff", ended.message), (
        repr(ended)
    )
    assert [failure["rank"] for failure in ended.result["failures"]] == [rank]


# --- every pair of layouts ---

VARIANTS: dict[str, tuple[list[object], dict[str, Any]]] = {
    "default": ([], {}),
    "small chunks": ([*CHUNKED, "--max_num_tokens", 24], {}),
    # A cache of the generation instance that is too small for its batch, so that requests are evicted and
    # computed again.
    "evictions": (
        ["--max_seq_len", 320],
        {"max_batch_size": 16, "kv_cache_config": {"max_tokens": 640, "tokens_per_block": 16}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pair_of_layouts(one: Starter, tmp_path: Path, variant: str) -> None:
    """Each pair answers 64 prompts with 64 new tokens."""
    answers = preset_answers("tiny-llama", tmp_path / "model", 64, 64)
    options, of_generation = VARIANTS[variant]
    n_evicted = 0
    for context, generation in itertools.product(HANDOFF_SIZES, HANDOFF_SIZES):
        file = sections(
            one.folder / f"{context}-to-{generation}.yaml",
            HANDOFF_SIZES[context],
            HANDOFF_SIZES[generation],
            **of_generation,
        )
        ranks = sum(tp * pp for tp, pp, _ in (HANDOFF_SIZES[context], HANDOFF_SIZES[generation]))
        instances = check_handoff(one, "tiny-llama", answers, file, ranks, *options, n_new=64, timeout=600)
        print(variant, file.stem, instances, flush=True)
        n_evicted += instances[1]["preemptions"]
    assert n_evicted > 0 or variant != "evictions"


@pytest.mark.slow
def test_experts(one: Starter, tmp_path: Path) -> None:
    answers = preset_answers("tiny-mixtral", tmp_path / "model", 64, 64)
    for context, generation in (((2, 1, 2), (1, 1, 1)), ((1, 2, 1), (4, 1, 2))):
        file = sections(one.folder / f"tp{context[0]}-to-tp{generation[0]}.yaml", context, generation)
        print(
            check_handoff(
                one,
                "tiny-mixtral",
                answers,
                file,
                context[0] * context[1] + generation[0],
                n_new=64,
                timeout=600,
            ),
            flush=True,
        )


@pytest.mark.slow
def test_a_real_model(one: Starter, tmp_path: Path) -> None:
    """A context instance hands over to two generation instances, with three KV heads on three ranks and 30
    layers on two."""
    model = fetch_model("smollm2-135m", ROOT / "build" / "models")
    answers = smollm2_answers(model, tmp_path)
    for name, context, generation, n_generations in (
        ("tp3-to-pp2", (3, 1, 1), (1, 2, 1), 1),
        ("pp2-to-tp1", (1, 2, 1), (1, 1, 1), 2),
    ):
        file = sections(one.folder / f"{name}.yaml", context, generation, n_generations=n_generations)
        ranks = context[0] * context[1] + n_generations * generation[0] * generation[1]
        print(name, check_handoff(one, model, answers, file, ranks, n_new=64, timeout=600), flush=True)
