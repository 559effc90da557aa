"""Greedy tokens equal those of transformers, prompt by prompt, whatever the topology, the batching, the
chunks and the evictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpillm.data.fetch import fetch_model
from tests.helpers.layouts import Answers, preset_answers, smollm2_answers
from tests.helpers.support import DONE, ROOT, Starter

NEW_TOKENS = 64
N_PROMPTS = 64

# Batching, chunk size, and a cache that is too small for the batch, so that requests are evicted and computed
# again.
VARIANTS = {
    "default": [],
    "small batch": ["--max_batch_size", 3],
    "small chunks": ["--enable_chunked_context", "true", "--max_num_tokens", 24],
    "evictions": [
        "--max_batch_size",
        16,
        "--kv_cache_tokens",
        640,
        "--tokens_per_block",
        16,
        "--max_seq_len",
        320,
    ],
}


def check(
    starter: Starter,
    ranks: int,
    mode: str,
    model: Path | str,
    dataset: Path,
    expected: list[list[int]],
    *options: object,
    log_dir: Path | None = None,
) -> Any:
    """Run once, check the answers, and return the run's result."""
    ended = starter.run(
        ranks,
        *(
            "--mode",
            mode,
            "--model_path",
            model,
            "--dataset_path",
            dataset,
            "--dtype",
            "float32",
            "--save_outputs",
        ),
        *("--max_output_len", NEW_TOKENS, *options),
        core="torch",
        log_dir=log_dir,
        timeout=600,
    ).must(DONE)
    answers = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert sorted(answers) == list(range(len(expected)))
    wrong = [index for index, tokens in enumerate(expected) if answers[index] != tokens]
    assert not wrong, (
        f"prompt {wrong[0]}: {answers[wrong[0]]}, transformers: {expected[wrong[0]]} ({len(wrong)}"
        " prompts differ)"
    )
    return ended.result


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return 64 prompts for tiny-llama, and transformers' answers with the same weights."""
    return preset_answers(
        "tiny-llama", tmp_path_factory.mktemp("tiny-llama"), N_PROMPTS, NEW_TOKENS, longest=150
    )


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The same with prompts of 16 tokens each."""
    folder = tmp_path_factory.mktemp("alike")
    return preset_answers("tiny-llama", folder, N_PROMPTS, NEW_TOKENS, shortest=16, longest=16)


CASES = [
    # Batches and chunks of an engine on its own are tests/unit/engine/test_engine_tokens.py's, too, and
    # test_cross_product.py has them all.
    pytest.param(
        mode,
        ranks,
        variant,
        marks=pytest.mark.slow if variant.startswith("small") or (ranks, variant) == (3, "evictions") else (),
    )
    for mode, ranks in (("aggregated", 3), ("disaggregated", 5))
    for variant in VARIANTS
    if (mode, variant) != ("disaggregated", "evictions")  # a test of its own, below
]


@pytest.mark.parametrize(("mode", "ranks", "variant"), CASES)
def test_tiny_llama(one: Starter, tiny: Answers, mode: str, ranks: int, variant: str) -> None:
    dataset, expected = tiny
    result = check(one, ranks, mode, "tiny-llama", dataset, expected, *VARIANTS[variant])
    if variant == "evictions":
        assert evictions(result) > 0, "the cache was not small enough to evict anything"


def test_evictions_after_a_handoff(one: Starter, alike: Answers) -> None:
    """A generation instance is sent no more tokens than its cache holds: it evicts when they take more blocks
    than that. Of 640 tokens in 20 blocks eight requests get 80 each, which is three blocks for the last 16
    tokens: five must be there at once. If contexts come one by one (seldom), it tries again.
    """
    dataset, expected = alike
    few = [*VARIANTS["evictions"], "--tokens_per_block", 32, "--num_ctx_servers", 2, "--num_gen_servers", 1]
    results = (check(one, 5, "disaggregated", "tiny-llama", dataset, expected, *few) for _ in range(4))
    assert any(evictions(result) > 0 for result in results)


def evictions(result: Any) -> int:
    return sum(instance["preemptions"] for instance in result["per_instance"])


def test_the_answers_differ(tiny: Answers) -> None:
    """The oracle would not notice swapped answers if they were alike, nor much else if they repeated one
    token."""
    _, expected = tiny
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert np.median([len(set(tokens)) for tokens in expected]) > 8


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Return the real model, fetched once for all runs of the tests."""
    return fetch_model("smollm2-135m", ROOT / "build" / "models")


@pytest.fixture(scope="module")
def smollm2_few(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return three prompts and transformers' answers."""
    return smollm2_answers(smollm2, tmp_path_factory.mktemp("three"), 3)


@pytest.mark.parametrize(
    ("mode", "ranks"), [pytest.param("aggregated", 2, marks=pytest.mark.slow), ("disaggregated", 3)]
)
def test_smollm2(one: Starter, smollm2: Path, smollm2_few: Answers, mode: str, ranks: int) -> None:
    """A few prompts are compared here, all 64 in `make test-slow`."""
    check(one, ranks, mode, smollm2, *smollm2_few)


@pytest.mark.slow
def test_smollm2_with_all_prompts(one: Starter, smollm2: Path, tmp_path: Path) -> None:
    dataset, expected = smollm2_answers(smollm2, tmp_path)
    for number, (name, options) in enumerate(VARIANTS.items()):
        for mode, ranks in (("aggregated", 3), ("disaggregated", 5)):
            if name == "evictions":
                options = [
                    "--max_batch_size",
                    16,
                    "--kv_cache_tokens",
                    1024,
                    "--tokens_per_block",
                    16,
                    "--max_seq_len",
                    512,
                ]
            result = check(
                one,
                ranks,
                mode,
                smollm2,
                dataset,
                expected,
                *options,
                log_dir=tmp_path / f"run-{number}-{mode}",
            )
            # these answers end early: a generation instance granted for long ones
            if name == "evictions" and mode == "aggregated":
                assert sum(instance["preemptions"] for instance in result["per_instance"]) > 0
