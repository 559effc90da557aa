"""Runs with speculative decoding give the tokens of transformers, in any layout.

A quick one is in test_parallel.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpillm.options.parsers import flag_dict
from tests.helpers.support import DONE, Starter

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.eagle_heads import save_head
from tests.helpers.layouts import (
    HANDOFF_SIZES,
    N_PROMPTS,
    SCARCER,
    VARIANTS,
    Answers,
    check,
    layout,
    oracle,
    preset_answers,
    sections,
)
from tests.helpers.layouts import check_handoff as check_pair
from tests.helpers.mtp_heads import save_model
from tests.helpers.presets import save_preset

NGRAM = "decoding_type:NGram,max_draft_len:4"
DRAFT = "decoding_type:Draft_Target,max_draft_len:3,speculative_model:tiny-llama"  # the model itself
N_NEW = 40


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return preset_answers("tiny-llama", tmp_path_factory.mktemp("tiny-llama"), N_PROMPTS, N_NEW)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_eagle_head(one: Starter, answers: Answers, tmp_path: Path, tp: int) -> None:
    save_preset("tiny-llama", tmp_path / "model")
    save_head(tmp_path / "model", tmp_path / "head")
    how = f"decoding_type:Eagle,max_draft_len:3,speculative_model:{tmp_path / 'head'}"
    instance = check(one, "tiny-llama", tp, answers, *layout(tp), "--speculative_config", how)
    assert 0 <= instance["accepted_tokens"] < instance["drafted_tokens"]


def test_deepseeks_own_layer_on_two_ranks(one: Starter, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    prompts = [np.random.default_rng(i).integers(3, 318, 5 + 9 * i).tolist() for i in range(5)]
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(f'{{"input_tokens": {prompt}}}\n' for prompt in prompts))
    how = "decoding_type:MTP,num_nextn_predict_layers:2"
    answers = dataset, oracle(model, prompts, 24)
    options = [*layout(2, ep=2), "--speculative_config", how]
    instance = check(one, tmp_path / "model", 2, answers, *options, n_new=24)
    assert 0 <= instance["accepted_tokens"] < instance["drafted_tokens"]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_given_acceptance_length(one: Starter, answers: Answers, tp: int, pp: int) -> None:
    """All ranks compute the accepted draft tokens, whatever the model prefers; the result says so."""
    dataset, expected = answers
    save_preset("tiny-llama", one.folder / "model")
    save_head(one.folder / "model", one.folder / "head")
    head = f"decoding_type:Eagle,max_draft_len:3,speculative_model:{one.folder / 'head'}"
    words = ["--model_path", one.folder / "model", "--dataset_path", dataset, "--num_threads", 1]
    words += ["--min_query_count", len(expected), "--max_output_len", N_NEW, "--min_output_len", N_NEW]
    words += [*layout(tp, pp), "--speculative_config", head if pp == 1 else NGRAM]
    words += ["--acceptance_length", 2.5, "--save_outputs"]
    ended = one.run(tp * pp + 1, *words, core="torch", timeout=300).must(DONE)
    assert all(len(line["output_tokens"]) == N_NEW for line in ended.outputs())
    figures = ended.result["speculation"]
    assert figures["set_acceptance_length"] == 2.5
    assert figures["acceptance_length"] == pytest.approx(2.5, abs=0.2)
    first, second, *others = figures["acceptance_by_position"]
    assert first > 0.9 and 0.3 < second < 0.7 and not any(others)
    assert "the acceptance of draft tokens is set" in ended.result["doubts"][0]
    assert (
        "set to 2.5" in ended.flowing
        and "Speculative decoding" in (ended.log_dir / "report.html").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [NGRAM, DRAFT], ids=["NGram", "Draft_Target"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts(one: Starter, answers: Answers, tp: int, pp: int, variant: str, how: str) -> None:
    options = [*layout(tp, pp), *VARIANTS[variant], "--speculative_config", how]
    options += SCARCER if variant == "scarce" else []
    instance = check(one, "tiny-llama", tp * pp, answers, *options)
    assert 0 < instance["accepted_tokens"] <= instance["drafted_tokens"]
    assert how == NGRAM or instance["accepted_tokens"] == instance["drafted_tokens"]
    assert variant == "default" or instance["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [NGRAM, DRAFT], ids=["NGram", "Draft_Target"])
@pytest.mark.parametrize(("context", "generation"), [("tp1", "tp1"), ("tp2", "pp2"), ("pp2", "tp2")])
def test_disaggregated(one: Starter, answers: Answers, context: str, generation: str, how: str) -> None:
    """The YAML asks for it in the generation section; no context instance guesses."""
    shapes = HANDOFF_SIZES[context], HANDOFF_SIZES[generation]
    file = sections(one.folder / "run.yaml", *shapes, speculative_config=flag_dict(how))
    ranks = sum(tp * pp for tp, pp, _ in shapes)
    first, second = check_pair(one, "tiny-llama", answers, file, ranks, n_new=N_NEW)
    assert "drafted_tokens" not in first and 0 < second["accepted_tokens"] <= second["drafted_tokens"]
