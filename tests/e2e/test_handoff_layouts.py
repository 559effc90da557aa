"""Greedy tokens equal those of transformers when context and generation instances have different layouts; and a lost rank is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import DONE, Starter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_parallel import Answers, preset_answers  # noqa: E402 - needs torch

Shape = tuple[int, int, int]  # TP, PP, EP

TP1, TP2, TP4, PP2, TP2PP2 = (1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1)

# Small chunks: a context takes several steps, so that its receiver has accepted it before the last of them.
SMALL_CHUNKS: list[object] = ["--max_num_tokens", 16]


def yaml(path: Path, context: Shape, generation: Shape, n_contexts: int = 1, n_generations: int = 1, **generation_limits: int) -> Path:
    """A disaggregation file; `generation_limits` are of the generation instances alone."""
    lines = []
    for name, n, (tp, pp, ep), limits in (
        ("context_servers", n_contexts, context, {}),
        ("generation_servers", n_generations, generation, generation_limits),
    ):
        sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "moe_expert_parallel_size": ep}
        cache = {key: limits.pop(key) for key in ("max_tokens", "tokens_per_block") if key in limits}
        lines.append(f"{name}: {json.dumps({'num_instances': n, **sizes, **limits, 'kv_cache_config': cache})}\n")
    path.write_text("".join(lines))
    return path


def n_ranks(*shapes: Shape) -> int:
    return 1 + sum(tp * pp for tp, pp, _ in shapes)


def check(
    starter: Starter,
    model: Path | str,
    answers: Answers,
    context: Shape,
    generation: Shape,
    *options: object,
    n_new: int,
    name: str = "run",
    **limits: int,
) -> Any:
    """One run; its answers are the expected ones. What its instances reported, context first."""
    dataset, expected = answers
    ended = starter.run(
        n_ranks(context, generation),
        *("--disagg_config", yaml(starter.folder / f"{name}.yaml", context, generation, **limits)),
        *("--model_path", model, "--dataset_path", dataset, "--dtype", "float32", "--save_outputs", "--num_threads", 1),
        *("--max_output_len", n_new, "--min_query_count", len(expected), *options),
        core="torch",
        log_dir=starter.folder / name,
        timeout=600,
    ).must(DONE)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert sorted(found) == list(range(len(expected)))
    wrong = [index for index, tokens in enumerate(expected) if found[index] != tokens]
    assert not wrong, f"prompt {wrong[0]}: {found[wrong[0]]}, transformers: {expected[wrong[0]]} ({len(wrong)} prompts differ)"
    return ended.result["per_instance"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return preset_answers("tiny-llama", tmp_path_factory.mktemp("tiny-llama"), 12, 16)


@pytest.mark.parametrize(
    ("context", "generation"), [(TP2, PP2), (PP2, TP2PP2), (TP1, TP4)], ids=["tp2-to-pp2", "pp2-to-tp2pp2", "tp1-to-tp4"]
)
def test_layouts(one: Starter, tiny: Answers, context: Shape, generation: Shape) -> None:
    """In small steps; blocks of different sizes at the two ends."""
    instances = check(one, "tiny-llama", tiny, context, generation, *SMALL_CHUNKS, n_new=16, tokens_per_block=16)
    dataset, expected = tiny
    n_tokens = sum(len(json.loads(line)["input_tokens"]) for line in dataset.read_text().splitlines())
    assert instances[0]["kv_bytes"] == n_tokens * 2 * 6 * 4 * 16 * 4
    assert [instance["samples"] for instance in instances] == [len(expected)] * 2
