"""Tokens of the torch core with speculative decoding equal those without it, in float32, all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.errors import ConfigError
from mpillm.comms.messages import RequestFlag
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.speculation.draft_model import DraftModel
from tests.helpers.draft_tokens import N_OUTPUT, NGRAM, draft_target
from tests.helpers.engine_configs import changed
from tests.helpers.oracle import Tokens
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import Answers, answer, hands_off, make_batch, make_core, make_pair


def counts(core: TorchCore) -> tuple[int, int]:
    statistics = core.statistics()
    return int(statistics["drafted_tokens"]), int(statistics["accepted_tokens"])


SCARCE = {"kv_cache_tokens": 256, "max_seq_len": None}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("NGram", {}),
        ("NGram", {"max_batch_size": 3, "max_num_tokens": 9}),
        ("NGram", {"max_num_tokens": 200, "enable_chunked_context": False}),
        ("NGram", SCARCE),
        ("NGram", SCARCE | {"enable_kv_cache_reuse": True, "max_num_tokens": 24}),
        ("NGram", SCARCE | {"tokens_per_block": 1, "batch_scheduler_policy": "no_evict"}),
        ("the model itself", {}),
        ("the model itself", SCARCE | {"max_num_tokens": 24}),
        ("half of it", {}),
        ("half of it", SCARCE | {"max_num_tokens": 24}),
    ],
    ids=str,
)
def test_greedy_tokens_are_the_plain_ones(
    folder: Path, draft_folder: Path, repetitive: Tokens, plain: Tokens, kind: str, options: dict[str, Any]
) -> None:
    draft = {"the model itself": folder, "half of it": draft_folder}
    config = NGRAM
    if kind in draft:
        config = draft_target(draft[kind])
    core = make_core(folder, speculative_config=config, **options)
    assert answer(core, make_batch(repetitive, max_output=N_OUTPUT)) == plain
    drafted, accepted = counts(core)
    assert 0 < accepted <= drafted
    if kind == "the model itself":
        assert accepted == drafted
        drafter = core.engine.speculation and core.engine.speculation._drafter
        assert isinstance(drafter, DraftModel)
        drafter.draft([])  # which gives back what the ended ones held
        assert drafter._blocks.n_free == drafter._blocks.n_blocks
    if options.get("max_seq_len", 0) is None and "batch_scheduler_policy" not in options:
        assert core.statistics()["preemptions"] > 0
    core.start_test()
    assert counts(core) == (0, 0)


@pytest.mark.long
def test_where_answers_end_and_what_streams(folder: Path, repetitive: Tokens, plain: Tokens) -> None:
    """End tokens, stop words, least lengths, log probabilities, sampling: all is as without guesses."""
    ends = (plain[0][20], plain[3][12])
    words = ((plain[1][15], plain[1][16]), (plain[4][9],))
    temperature = [0, 0.7, 0] * 3
    fields: list[dict[str, Any]] = [
        {},
        {"min_output": 25},
        {"min_output": 14, "flags": [RequestFlag.STREAM * (i % 2) for i in range(9)]},
        {"temperature": temperature, "seed": range(9), "top_k": 3, "logprobs": 2},
    ]
    for more in fields:
        found = []
        for config in (None, NGRAM):
            core = make_core(folder, speculative_config=config, end_ids=ends, stop_words=words)
            found.append(answer(core, make_batch(repetitive, max_output=N_OUTPUT, **more)))
            if config:
                assert counts(core)[1] > 0
        assert found[0] == found[1]
    assert len({len(tokens) for tokens in found[0]}) > 2


def test_the_tokens_of_a_step_stream_at_once(folder: Path, plain: Tokens, repetitive: Tokens) -> None:
    core = make_core(folder, speculative_config=NGRAM)
    core.enqueue(make_batch(repetitive, max_output=N_OUTPUT, flags=RequestFlag.STREAM))
    answers = Answers().run(core)
    assert answers.tokens() == plain
    for i, tokens in enumerate(plain):  # `Answers` has compared them; the last comes with the whole answer
        assert 0 < len(answers.partial[i]) < len(tokens) - 1


@pytest.mark.parametrize("scarce", [False, True])
def test_disaggregated(
    folder: Path, draft_folder: Path, repetitive: Tokens, plain: Tokens, scarce: bool
) -> None:
    """Only the generation instance guesses; a draft model there computes the prompts for itself."""
    for config in (NGRAM, draft_target(draft_folder)):
        cache = {"kv_cache_tokens": 192, "max_seq_len": None} if scarce else {}
        context, generation = make_pair(
            folder, {"speculative_config": config}, {"speculative_config": config, **cache}
        )
        batch = make_batch(repetitive, max_output=N_OUTPUT, generation=1)
        assert hands_off(context, generation, batch) == plain
        assert "drafted_tokens" not in context.statistics()
        assert counts(generation)[1] > 0
        assert (generation.statistics()["preemptions"] > 0) == scarce


def test_a_draft_model_with_a_small_cache_guesses_less(
    folder: Path, repetitive: Tokens, plain: Tokens
) -> None:
    """It guesses for the sequences that it has room for."""
    found = []
    for n_blocks in (None, 12):
        core = make_core(folder, speculative_config=draft_target(folder, 4))
        assert core.engine.speculation is not None
        drafter = core.engine.speculation._drafter
        assert isinstance(drafter, DraftModel)
        if n_blocks is not None:
            drafter._blocks.take(drafter._blocks.n_free - n_blocks)
        assert answer(core, make_batch(repetitive, max_output=N_OUTPUT)) == plain
        drafted, accepted = counts(core)
        assert drafted == accepted
        found.append(drafted)
    assert 0 < found[1] < found[0]


def test_bfloat16_runs(folder: Path, repetitive: Tokens) -> None:
    core = make_core(folder, speculative_config=NGRAM, dtype="bfloat16", kv_cache_dtype="fp8")
    tokens = answer(core, make_batch(repetitive, max_output=N_OUTPUT))
    assert all(len(one) == N_OUTPUT for one in tokens) and counts(core)[0] > 0
    assert core.engine.worker.part.cache.keys.dtype == torch.float8_e4m3fn


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    def refused(**options: Any) -> str:
        config = make_core(folder).config.engine
        with pytest.raises(ConfigError) as error:
            TorchCore.check(CoreConfig("torch", changed(config, **options)))
        assert "speculative_config" in error.value.about
        return str(error.value)

    save_preset("tiny-llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    target = draft_target(tmp_path)
    assert "vocabulary has 500 tokens" in refused(speculative_config=target, load_format="dummy")
    target["speculative_model"] = "nowhere"
    assert "nowhere" in refused(speculative_config=target)
    assert "decoding_type EAGLE" in refused(speculative_config={"decoding_type": "EAGLE"})
