"""Greedy tokens equal those of transformers, prompt by prompt, whatever the topology, the batching, the chunks and the evictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import DONE, ROOT, Starter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mpillm.engine.weights import save_preset  # noqa: E402 - needs torch
from mpillm.models import fetch_model  # noqa: E402

NEW_TOKENS = 64
N_PROMPTS = 64

# Batching, chunk size, and a cache that is too small for the batch, so that requests are evicted and computed again.
VARIANTS = {
    "default": [],
    "small batch": ["--max_batch_size", 3],
    "small chunks": ["--enable_chunked_context", "true", "--max_num_tokens", 24],
    "evictions": ["--max_batch_size", 16, "--kv_cache_tokens", 640, "--tokens_per_block", 16, "--max_seq_len", 320],
}


SELDOM = ("disaggregated", "evictions")


def generate(model: Any, prompt: list[int], n_new: int) -> list[int]:
    """What transformers answers to one prompt, alone: the end token included, nothing behind it."""
    with torch.inference_mode():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=n_new, do_sample=False, pad_token_id=0)
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


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
    """One run; its answers are the expected ones. The run's result."""
    ended = starter.run(
        ranks,
        *("--mode", mode, "--model_path", model, "--dataset_path", dataset, "--dtype", "float32", "--save_outputs"),
        *("--max_output_len", NEW_TOKENS, *options),
        core="torch",
        log_dir=log_dir,
        timeout=600,
    ).must(DONE)
    answers = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert sorted(answers) == list(range(len(expected)))
    wrong = [index for index, tokens in enumerate(expected) if answers[index] != tokens]
    assert not wrong, f"prompt {wrong[0]}: {answers[wrong[0]]}, transformers: {expected[wrong[0]]} ({len(wrong)} prompts differ)"
    return ended.result


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """64 prompts for tiny-llama, and transformers' answers with the same weights."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_preset("tiny-llama", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random = np.random.default_rng(7)
    prompts = [random.integers(3, model.config.vocab_size, 1 + 11 * i % 150).tolist() for i in range(N_PROMPTS)]
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"input_tokens": prompt}) + "\n" for prompt in prompts))
    return dataset, [generate(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("mode", "ranks"), [("aggregated", 3), ("disaggregated", 5)])
def test_tiny_llama(one: Starter, tiny: tuple[Path, list[list[int]]], mode: str, ranks: int, variant: str) -> None:
    dataset, expected = tiny
    # A generation instance is sent no more tokens than its cache holds: it evicts when they take more blocks than that. And two context
    # instances keep one busy on a slow machine, too.
    pressed = ["--tokens_per_block", 64, "--num_ctx_servers", 2, "--num_gen_servers", 1] if (mode, variant) == SELDOM else []
    result = check(one, ranks, mode, "tiny-llama", dataset, expected, *VARIANTS[variant], *pressed)
    if variant == "evictions":
        assert sum(instance["preemptions"] for instance in result["per_instance"]) > 0, "the cache was not small enough to evict anything"


def test_the_answers_differ(tiny: tuple[Path, list[list[int]]]) -> None:
    """The oracle would not notice swapped answers if they were alike, nor much else if they repeated one token."""
    _, expected = tiny
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert np.median([len(set(tokens)) for tokens in expected]) > 8


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real model, fetched once for all runs of the tests."""
    return fetch_model("smollm2-135m", ROOT / "build" / "models")


def smollm2_oracle(folder: Path, n_prompts: int) -> tuple[Path, list[list[int]]]:
    """The first prompts of the data set that comes with mpillm, and transformers' answers."""
    from mpillm.dataset import BUILTIN_PROMPTS
    from mpillm.tokenizer import load_tokenizer

    lines = BUILTIN_PROMPTS.read_text(encoding="utf-8").splitlines()[:n_prompts]
    tokenizer = load_tokenizer(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return BUILTIN_PROMPTS, [generate(model, tokenizer.encode(json.loads(line)["prompt"]), NEW_TOKENS) for line in lines]


def first_lines(path: Path, n: int, target: Path) -> Path:
    """A data set of the first n samples of `path`."""
    target.write_text("".join(line + "\n" for line in path.read_text(encoding="utf-8").splitlines()[:n]), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def smollm2_few(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Six prompts and transformers' answers."""
    path, expected = smollm2_oracle(smollm2, 6)
    return first_lines(path, 6, tmp_path_factory.mktemp("six") / "six.jsonl"), expected


@pytest.mark.parametrize(("mode", "ranks"), [("aggregated", 2), ("disaggregated", 3)])
def test_smollm2(one: Starter, smollm2: Path, smollm2_few: tuple[Path, list[list[int]]], mode: str, ranks: int) -> None:
    """A few prompts of the real model; all 64 in `make test-slow`."""
    check(one, ranks, mode, smollm2, *smollm2_few)


@pytest.mark.slow
def test_smollm2_with_all_prompts(one: Starter, smollm2: Path, tmp_path: Path) -> None:
    path, expected = smollm2_oracle(smollm2, N_PROMPTS)
    dataset = first_lines(path, N_PROMPTS, tmp_path / "prompts.jsonl")
    for number, (name, options) in enumerate(VARIANTS.items()):
        for mode, ranks in (("aggregated", 3), ("disaggregated", 5)):
            if name == "evictions":
                options = ["--max_batch_size", 16, "--kv_cache_tokens", 1024, "--tokens_per_block", 16, "--max_seq_len", 512]
            result = check(one, ranks, mode, smollm2, dataset, expected, *options, log_dir=tmp_path / f"run-{number}-{mode}")
            if name == "evictions" and mode == "aggregated":  # these answers end early: a generation instance granted for long ones
                assert sum(instance["preemptions"] for instance in result["per_instance"]) > 0
