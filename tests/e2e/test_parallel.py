"""Greedy tokens equal those of transformers when an instance is several ranks, in any layout.

A lost follower is named.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.layouts import (
    N_PROMPTS,
    NEW_TOKENS,
    SCARCER,
    VARIANTS,
    Answers,
    check,
    layout,
    oracle,
    preset_answers,
    smollm2_answers,
)
from tests.helpers.support import CHUNKED, DONE, INSTANCE_LOST, ROOT, TEST_FAILED, USAGE, Starter, wait_until

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mpillm.data.fetch import fetch_model  # noqa: E402
from tests.helpers.presets import save_preset  # noqa: E402 - needs torch


@pytest.fixture(scope="module")
def presets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """Return prompts for each of the tiny models, and transformers' answers with the same weights."""
    return {
        name: preset_answers(name, tmp_path_factory.mktemp(name), N_PROMPTS, NEW_TOKENS)
        for name in ("tiny-llama", "tiny-mixtral")
    }


# Small chunks and a scarce cache for most of them; the default for one of each model. `test_every_layout` has
# both for all.
@pytest.mark.parametrize(
    ("model", "tp", "pp", "ep", "variant"),
    [
        ("tiny-llama", 2, 1, 1, "default"),
        ("tiny-llama", 1, 3, 1, "scarce"),
        ("tiny-llama", 2, 2, 1, "scarce"),
        ("tiny-mixtral", 2, 1, 2, "default"),
        ("tiny-mixtral", 4, 1, 2, "scarce"),
    ],
)
def test_layouts(
    one: Starter, presets: dict[str, Answers], model: str, tp: int, pp: int, ep: int, variant: str
) -> None:
    instance = check(one, model, tp * pp, presets[model], *layout(tp, pp, ep), *VARIANTS[variant])
    assert variant == "default" or instance["preemptions"] > 0, (
        "the cache was not small enough to evict anything"
    )


def test_guesses(one: Starter, presets: dict[str, Answers]) -> None:
    """Speculative decoding changes no token; result.json says what was guessed, and how much was right."""
    guesses = ["--speculative_config", "decoding_type:NGram,max_draft_len:4"]
    options = [*layout(pp=2), *VARIANTS["scarce"], *SCARCER, *guesses]
    instance = check(one, "tiny-llama", 2, presets["tiny-llama"], *options)
    assert 0 < instance["accepted_tokens"] < instance["drafted_tokens"] and instance["preemptions"] > 0


def test_the_answers_differ(presets: dict[str, Answers]) -> None:
    """The oracle would not notice swapped answers if they were alike, nor much else if they repeated one
    token."""
    for _, expected in presets.values():
        assert len({tuple(tokens) for tokens in expected}) == len(expected)
        assert np.median([len(set(tokens)) for tokens in expected]) > 8


def test_sampled_tokens_do_not_depend_on_the_layout(one: Starter, presets: dict[str, Answers]) -> None:
    """The sampler gets all columns of the logits, the parameters, the seed and the place on any rank."""
    dataset, _ = presets["tiny-llama"]
    options = [
        "--model_path",
        "tiny-llama",
        "--dataset_path",
        dataset,
        "--num_threads",
        1,
        "--min_query_count",
        N_PROMPTS,
    ]
    sampled = [
        "--max_output_len",
        12,
        "--min_output_len",
        12,
        "--temperature",
        0.8,
        "--top_k",
        20,
        "--top_p",
        0.95,
        "--save_outputs",
    ]
    found = []
    for name, ranks, extra in (("alone", 2, []), ("split", 5, layout(2, 2))):
        ended = one.run(ranks, *options, *sampled, *extra, core="torch", log_dir=one.folder / name).must(DONE)
        found.append({line["index"]: line["output_tokens"] for line in ended.outputs()})
    assert found[0] == found[1]


def test_a_model_that_does_not_divide(one: Starter, tmp_path: Path) -> None:
    """Vocabulary, intermediate size and layers are split unevenly.

    The last stage has its share of the tied embedding.
    """
    save_preset("tiny-llama", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {
        "vocab_size": 509,
        "intermediate_size": 251,
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw)).eval()
    model.save_pretrained(tmp_path)
    prompts = [np.random.default_rng(i).integers(3, 509, 5 + 3 * i).tolist() for i in range(8)]
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"input_tokens": prompt}) + "\n" for prompt in prompts))
    check(one, tmp_path, 4, (dataset, oracle(model, prompts, NEW_TOKENS)), *layout(2, 2))


def test_bfloat16_starts_like_float32(one: Starter, presets: dict[str, Answers]) -> None:
    dataset, expected = presets["tiny-mixtral"]
    options = [
        "--model_path",
        "tiny-mixtral",
        "--dataset_path",
        dataset,
        "--dtype",
        "bfloat16",
        "--num_threads",
        1,
        "--save_outputs",
    ]
    ended = one.run(
        5, *options, "--min_query_count", N_PROMPTS, "--max_output_len", 4, *layout(2, 2, 2), core="torch"
    ).must(DONE)
    first = {line["index"]: line["output_tokens"][0] for line in ended.outputs()}
    assert sum(first[i] == tokens[0] for i, tokens in enumerate(expected)) >= 0.8 * N_PROMPTS


# --- errors ---


@pytest.mark.parametrize(
    ("model", "ranks", "options", "message"),
    [
        (
            "tiny-llama",
            3,
            ["--tensor_parallelism", 3],
            "tensor_parallel_size 3 does not divide the 8 attention heads of tiny-llama",
        ),
        ("tiny-llama", 2, layout(2, 1, 2), "moe_expert_parallel_size 2: tiny-llama has no experts"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_divide_the_model(
    one: Starter, model: str, ranks: int, options: list[object], message: str
) -> None:
    ended = one.run(ranks + 1, "--model_path", model, *options, core="torch").must(USAGE)
    assert message in ended.message


@pytest.mark.parametrize(
    ("tp", "pp", "rank"), [(2, 1, 2), (1, 2, 1), pytest.param(2, 2, 3, marks=pytest.mark.slow)]
)
def test_a_killed_rank_of_an_instance(one: Starter, tp: int, pp: int, rank: int) -> None:
    """Ranks that wait for it inside a collective are ended as well."""
    options = [
        "--scenarios",
        "Server",
        "--server_target_qps",
        100,
        "--min_duration",
        100,
        "--grace",
        3,
        *layout(tp, pp),
    ]
    command = one.start(
        tp * pp + 1, "--model_path", "tiny-llama", "--max_output_len", 40, *options, *CHUNKED, core="torch"
    )
    pid = command.wait_rank(rank)
    wait_until(lambda: "\n  ready " in command.out, "the test")
    os.kill(pid, signal.SIGKILL)
    ended = command.end().must(INSTANCE_LOST)
    assert re.search(
        rf"\brank {rank} \(executor, instance 0\), .*, pid {pid}: the process has ended", ended.message
    )


@pytest.mark.parametrize(("tp", "pp", "rank"), [(2, 1, 2), (1, 2, 2)])
def test_a_rank_of_an_instance_that_raises(one: Starter, tp: int, pp: int, rank: int) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_RANK": str(rank)}
    options = ["--model_path", "tiny-llama", "--max_output_len", 40, "--grace", 3, *layout(tp, pp), *CHUNKED]
    ended = one.run(tp * pp + 1, *options, core="tests.helpers.plugin_torch_cores:Failing", env=env).must(
        TEST_FAILED
    )
    assert re.search(
        rf"\brank {rank} \(executor, instance 0\), .*: ValueError: broken in a step", ended.message
    )
    assert [failure["rank"] for failure in ended.result["failures"]] == [rank]


# --- a real model ---


EVERY_LAYOUT = {
    "smollm2-135m": [(1, 2, 1), (3, 2, 1), (1, 4, 1), (3, 1, 1)],
    "tiny-llama": [(2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 2, 1)],
    "tiny-mixtral": [(1, 1, 1), (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4), (2, 2, 2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_LAYOUT)
def test_every_layout(one: Starter, tmp_path: Path, name: str) -> None:
    """Each layout and variant answers 64 prompts with 64 new tokens; tiny-llama with TP 8 holds each KV head
    twice."""
    path: Path | str = name
    small = [
        *CHUNKED,
        "--max_num_tokens",
        24,
        "--kv_cache_tokens",
        640,
        "--tokens_per_block",
        32,
        "--max_seq_len",
        320,
    ]
    if name.startswith("smollm2"):
        path = fetch_model(name, ROOT / "build" / "models")
        small = [
            "--max_batch_size",
            16,
            "--kv_cache_tokens",
            1600,
            "--tokens_per_block",
            16,
            "--max_seq_len",
            1024,
        ]
        answers = smollm2_answers(path, tmp_path)
    else:
        answers = preset_answers(name, tmp_path / "model", 64, 64)
    n_evicted = 0
    for tp, pp, ep in EVERY_LAYOUT[name]:
        for variant, options in (("default", []), ("scarce", small)):
            run = f"tp{tp}-pp{pp}-ep{ep}-{variant}"
            instance = check(one, path, tp * pp, answers, *layout(tp, pp, ep), *options, n_new=64, name=run)
            print(name, run, instance, flush=True)
            n_evicted += instance["preemptions"]
    # its prompts are long: credits alone keep them from crowding
    assert n_evicted > 0 or name.startswith("smollm2")
