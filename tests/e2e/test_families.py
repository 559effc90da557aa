"""Every family of models: greedy tokens equal those of transformers in several layouts, and handed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpillm.engine.model.families import FAMILIES
from tests.e2e.test_parallel import VARIANTS, Answers, check, layout, oracle
from tests.helpers.families import make_family
from tests.helpers.support import DONE, USAGE, Starter, make_samples

pytest.importorskip("torch")
pytest.importorskip("transformers")

N_PROMPTS, NEW_TOKENS = 12, 24
GUESSES = ["--speculative_config", "decoding_type:NGram,max_draft_len:3"]
NAMES = ("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # the others have tests of their own


@pytest.fixture(scope="module", params=NAMES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Answers]]:
    """Yield a model's folder, and prompts with transformers' answers."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_family(request.param, folder / "model")
    lengths = np.random.default_rng(5).integers(1, 60, N_PROMPTS).tolist()
    prompts = [np.random.default_rng(i).integers(3, 318, n).tolist() for i, n in enumerate(lengths)]
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(f'{{"input_tokens": {prompt}}}\n' for prompt in prompts))
    yield folder / "model", (dataset, oracle(model, prompts, NEW_TOKENS))


def test_there_is_a_test_for_every_family() -> None:
    assert {*NAMES, "LlamaForCausalLM", "MixtralForCausalLM"} == set(FAMILIES)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, VARIANTS["scarce"], id="chunks and evictions"),
        pytest.param(2, layout(tp=2), id="tp 2", marks=pytest.mark.slow),
        pytest.param(4, [*layout(tp=2, pp=2), *GUESSES], id="tp 2, pp 2, guesses", marks=pytest.mark.slow),
    ],
)
def test_layouts(one: Starter, family: tuple[Path, Answers], ranks: int, options: list[object]) -> None:
    model, answers = family
    assert len({tuple(tokens) for tokens in answers[1]}) > N_PROMPTS // 2
    check(one, model, ranks, answers, *options, n_new=NEW_TOKENS)


def test_a_handoff_between_layouts(one: Starter, family: tuple[Path, Answers]) -> None:
    """From two ranks to one; chunks, and blocks that are reused."""
    model, (dataset, expected) = family
    ended = one.run(
        4,
        *("--mode", "disaggregated", "--ctx_tp_size", 2, "--model_path", model, "--dataset_path", dataset),
        *("--dtype", "float32", "--save_outputs", "--max_output_len", NEW_TOKENS, "--num_threads", 1),
        *("--min_query_count", N_PROMPTS, "--enable_kv_cache_reuse", "true"),
        *("--enable_chunked_context", "true", "--max_num_tokens", 24),
        core="torch",
        timeout=300,
    ).must(DONE)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert [found[index] for index in range(N_PROMPTS)] == expected


@pytest.mark.slow
def test_an_engine_holds_biases_and_norms(one: Starter, family: tuple[Path, Answers]) -> None:
    from mpillm.engine.weights.build_engine import build

    model, answers = family
    engine = one.folder / "engine"
    build(model, engine, tp_size=2, dtype="float32")
    check(one, model, 2, answers, *layout(tp=2), "--engine_dir", engine, n_new=NEW_TOKENS)


def test_a_window_limits_sequences(one: Starter, tmp_path: Path) -> None:
    """Within it tokens are transformers'; beyond it a run is refused before anything is loaded."""
    make_family("MistralForCausalLM", tmp_path / "model", sliding_window=64)
    samples = tmp_path / "prompts.jsonl"
    make_samples(samples, [8, 8])
    common = ("--model_path", tmp_path / "model", "--dataset_path", samples, "--max_output_len", 4)
    ended = one.run(2, *common, "--max_seq_len", 65, core="torch").must(USAGE)
    assert "max_seq_len 65: " in ended.message and "allows 1 to 64, its sliding_window" in ended.message
    one.run(2, *common, core="torch", log_dir=tmp_path / "short").must(DONE)
