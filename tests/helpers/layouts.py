"""Runs in any layout, whose greedy tokens are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.helpers.presets import save_preset
from tests.helpers.support import CHUNKED, DONE, Starter

N_PROMPTS, NEW_TOKENS = 16, 40
Answers = tuple[Path, list[list[int]]]  # data set, transformers' answers
VARIANTS: dict[str, list[object]] = {
    "default": [],
    # Small chunks, and a cache that is too small for the batch, so that requests are evicted and computed
    # again.
    "scarce": [
        *CHUNKED,
        "--max_num_tokens",
        24,
        "--kv_cache_tokens",
        320,
        "--tokens_per_block",
        32,
        "--max_seq_len",
        200,
    ],
}
SCARCER: list[object] = ["--tokens_per_block", 16, "--kv_cache_tokens", 208]  # for answers that end sooner


def layout(tp: int = 1, pp: int = 1, ep: int = 1) -> list[object]:
    return ["--tensor_parallelism", tp, "--pipeline_parallelism", pp, "--moe_expert_parallelism", ep]


def check(
    starter: Starter,
    model: Path | str,
    ranks: int,
    answers: Answers,
    *options: object,
    n_new: int = NEW_TOKENS,
    name: str = "run",
) -> Any:
    """Run one instance of `ranks` ranks, check its answers, and return the run's result."""
    dataset, expected = answers
    ended = starter.run(
        ranks + 1,
        *(
            "--model_path",
            model,
            "--dataset_path",
            dataset,
            "--dtype",
            "float32",
            "--save_outputs",
            "--num_threads",
            1,
        ),
        *("--max_output_len", n_new, "--min_query_count", len(expected), *options),
        core="torch",
        log_dir=starter.folder / name,
        timeout=600,
    ).must(DONE)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert sorted(found) == list(range(len(expected)))
    wrong = [index for index, tokens in enumerate(expected) if found[index] != tokens]
    assert not wrong, (
        f"prompt {wrong[0]}: {found[wrong[0]]}, transformers: {expected[wrong[0]]} ({len(wrong)}"
        " prompts differ)"
    )
    (instance,) = ended.result["per_instance"]
    assert instance["samples"] == len(expected)
    return instance


def oracle(model: Any, prompts: list[list[int]], n_new: int) -> list[list[int]]:
    """Return transformers' answers, one prompt at a time: the end token included, nothing behind it."""
    # small products: a second thread costs more than it gives, above all on a busy machine
    torch.set_num_threads(1)
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            answer = model.generate(
                torch.tensor([prompt]), max_new_tokens=n_new, do_sample=False, pad_token_id=0
            )
            answers.append(answer[0, len(prompt) :].tolist())
    return answers


def preset_answers(
    preset: str, folder: Path, n_prompts: int, n_new: int, shortest: int = 1, longest: int = 50
) -> Answers:
    """Return random prompts of `shortest` to `longest` tokens, and transformers' answers."""
    save_preset(preset, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random = np.random.default_rng(7)
    lengths = [shortest + 11 * i % (longest - shortest + 1) for i in range(n_prompts)]
    prompts = [random.integers(3, model.config.vocab_size, length).tolist() for length in lengths]
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"input_tokens": prompt}) + "\n" for prompt in prompts))
    return dataset, oracle(model, prompts, n_new)


def smollm2_answers(model: Path, folder: Path, n_prompts: int = 64) -> Answers:
    """Return answers to the first prompts of the data set that comes with mpillm."""
    from mpillm.data.dataset import BUILTIN_PROMPTS
    from mpillm.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    lines = BUILTIN_PROMPTS.read_text(encoding="utf-8").splitlines()[:n_prompts]
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return dataset, oracle(loaded, [tokenizer.encode(json.loads(line)["prompt"]) for line in lines], 64)


Shape = tuple[int, int, int]  # TP, PP, EP
HANDOFF_SIZES: dict[str, Shape] = {
    "tp1": (1, 1, 1),
    "tp2": (2, 1, 1),
    "tp4": (4, 1, 1),
    "pp2": (1, 2, 1),
    "tp2pp2": (2, 2, 1),
}


def sections(
    path: Path,
    context: Shape,
    generation: Shape,
    n_contexts: int = 1,
    n_generations: int = 1,
    **of_generation: Any,
) -> Path:
    """Return a disaggregation file; `of_generation` are further values of the generation section."""
    text = ""
    for name, n, (tp, pp, ep), more in (
        ("context_servers", n_contexts, context, {}),
        ("generation_servers", n_generations, generation, of_generation),
    ):
        sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "moe_expert_parallel_size": ep}
        text += f"{name}: {json.dumps({'num_instances': n, **sizes, **more})}\n"
    path.write_text(text)
    return path


def check_handoff(
    starter: Starter,
    model: Path | str,
    answers: Answers,
    file: Path,
    ranks: int,
    *options: object,
    n_new: int,
    timeout: float = 60,
    **more: Any,
) -> list[dict[str, Any]]:
    """Run over `ranks` ranks of instances, and check the answers.

    Returns the instances' reports, contexts first.
    """
    dataset, expected = answers
    ended = starter.run(
        ranks + 1,
        *(
            "--disagg_config",
            file,
            "--model_path",
            model,
            "--dataset_path",
            dataset,
            "--dtype",
            "float32",
            "--save_outputs",
        ),
        *("--num_threads", 1, "--max_output_len", n_new, "--min_query_count", len(expected), *options),
        log_dir=file.with_suffix(""),
        timeout=timeout,
        **{"core": "torch", **more},
    ).must(DONE)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert sorted(found) == list(range(len(expected)))
    wrong = [index for index, tokens in enumerate(expected) if found[index] != tokens]
    assert not wrong, (
        f"prompt {wrong[0]}: {found[wrong[0]]}, transformers: {expected[wrong[0]]} ({len(wrong)}"
        " prompts differ)"
    )
    instances: list[dict[str, Any]] = ended.result["per_instance"]
    assert (
        sum(instance["tokens"] for instance in instances) == sum(map(len, expected)) == ended.result["tokens"]
    )
    return instances


GUESSES = ["--speculative_config", "decoding_type:NGram,max_draft_len:3"]
ALIKE_TOKENS = 64
# 10 blocks, of which a sequence has 2 when it starts and 4 when it ends.
SCARCE: list[object] = ["--tokens_per_block", 32, "--kv_cache_tokens", 320, "--max_seq_len", 200]
CHUNKINGS: dict[str, list[object]] = {
    "unchunked": ["--enable_chunked_context", "false", "--max_num_tokens", 160],
    "in order": ["--enable_chunked_context", "true", "--max_num_tokens", 24],
    "evenly": [
        "--enable_chunked_context",
        "true",
        "--max_num_tokens",
        24,
        "--context_chunking_policy",
        "equal_progress",
    ],
}


def prompts_alike(folder: Path, n_prompts: int) -> Answers:
    """Return prompts of 34 to 40 tokens for tiny-llama, every third beginning alike, and transformers'
    answers."""
    save_preset("tiny-llama", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random = np.random.default_rng(11)
    beginnings = [random.integers(3, 512, 33).tolist() for _ in range(3)]
    prompts = [beginnings[i % 3] + random.integers(3, 512, 1 + i % 7).tolist() for i in range(n_prompts)]
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"input_tokens": prompt}) + "\n" for prompt in prompts))
    return dataset, oracle(model, prompts, ALIKE_TOKENS)


FAMILY_PROMPTS, FAMILY_TOKENS = 12, 24


def make_answers(model: Any, folder: Path) -> Answers:
    """Return prompts, longer than windows and shorter, and transformers' answers."""
    lengths = np.random.default_rng(5).integers(1, 60, FAMILY_PROMPTS).tolist()
    prompts = [np.random.default_rng(i).integers(3, 318, n).tolist() for i, n in enumerate(lengths)]
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(f'{{"input_tokens": {prompt}}}\n' for prompt in prompts))
    return dataset, oracle(model, prompts, FAMILY_TOKENS)
