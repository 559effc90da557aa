"""Families over several GPUs: greedy tokens equal those of transformers, in the layouts and handed over.

The batch is so small that layers with a window have blocks of their own (see `WindowBlocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.families import make_family  # noqa: E402
from tests.helpers.layouts import (  # noqa: E402  # noqa: E402
    FAMILY_PROMPTS,
    FAMILY_TOKENS,
    GUESSES,
    Answers,
    check,
    layout,
    make_answers,
)
from tests.helpers.support import CHUNKED, DONE, Starter  # noqa: E402

N_GPUS = torch.cuda.device_count()
if N_GPUS < 2:
    pytest.skip("needs several GPUs", allow_module_level=True)

SMALL: list[object] = [*CHUNKED, "--max_num_tokens", 24, "--max_batch_size", 4, "--tokens_per_block", 8]
SMALL += ["--max_seq_len", 120]
REUSE: list[object] = ["--enable_kv_cache_reuse", "true"]


@pytest.fixture(scope="module", params=["GptOssForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Answers, bool]]:
    """Yield a model's folder, prompts with transformers' answers, and whether it has experts."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_family(request.param, folder / "model")
    yield folder / "model", make_answers(model, folder), not request.param.startswith("Gemma")


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, REUSE, id="reuse"),
        pytest.param(2, [*layout(tp=2), *REUSE], id="tp 2, reuse"),
        pytest.param(2, layout(pp=2), id="pp 2"),
        pytest.param(2, layout(tp=2, ep=2), id="tp 2, ep 2"),
        pytest.param(4, layout(tp=4, ep=2), id="tp 4, ep 2"),
        pytest.param(4, [*layout(tp=2, pp=2), *GUESSES], id="tp 2, pp 2, guesses"),
    ],
)
def test_layouts(one: Starter, family: tuple[Path, Answers, bool], ranks: int, options: list[object]) -> None:
    model, answers, has_experts = family
    if ranks > N_GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    if "--moe_expert_parallelism" in options and not has_experts:
        at = options.index("--moe_expert_parallelism")
        options = [*options[:at], *options[at + 2 :]]
    check(one, model, ranks, answers, *SMALL, *options, n_new=FAMILY_TOKENS)


@pytest.mark.parametrize(("ctx", "gen"), [(1, 1), (2, 1), (1, 2)])
def test_a_handoff(one: Starter, family: tuple[Path, Answers, bool], ctx: int, gen: int) -> None:
    model, (dataset, expected), _ = family
    if ctx + gen > N_GPUS:
        pytest.skip(f"needs {ctx + gen} GPUs")
    ended = one.run(
        1 + ctx + gen,
        *("--mode", "disaggregated", "--ctx_tp_size", ctx, "--gen_tp_size", gen),
        *("--model_path", model, "--dataset_path", dataset, "--dtype", "float32", "--save_outputs"),
        *("--max_output_len", FAMILY_TOKENS, "--min_query_count", FAMILY_PROMPTS, *SMALL, *REUSE),
        core="torch",
        timeout=300,
    ).must(DONE)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert [found[index] for index in range(FAMILY_PROMPTS)] == expected
