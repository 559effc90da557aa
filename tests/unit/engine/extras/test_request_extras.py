"""Logits, penalties and forbidden words of the torch core against transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.engine.extras.request_extras import RequestExtras
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from tests.helpers.extras_checks import (
    AS_ON_A_GPU,
    N_OUTPUT,
    PROMPTS,
    answers,
    check_bad_words_and_repetition,
    check_logits,
    check_presence_frequency_bias_and_minimum,
)
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import make_core


@pytest.fixture(params=[{}, AS_ON_A_GPU], ids=["cpu", "as on a gpu"])
def on(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return options that say where a core computes."""
    return dict(request.param)


@pytest.mark.parametrize(
    "core_options",
    [
        {},
        {"max_num_tokens": 16},
        {"enable_kv_cache_reuse": True},
        {"max_seq_len": 56, "kv_cache_tokens": 56, "max_batch_size": 4},
    ],
    ids=["plain", "chunked", "reuse", "evicted"],
)
@pytest.mark.long
def test_logits(core_options: dict[str, Any], folder: Path, oracle: Oracle, on: dict[str, Any]) -> None:
    check_logits(folder, oracle, **on, **core_options)


@pytest.mark.long
def test_bad_words_and_repetition(folder: Path, oracle: Oracle, on: dict[str, Any]) -> None:
    check_bad_words_and_repetition(folder, oracle, **on)


@pytest.mark.long
def test_presence_frequency_bias_and_an_end_that_may_not_come_yet(
    folder: Path, oracle: Oracle, on: dict[str, Any]
) -> None:
    check_presence_frequency_bias_and_minimum(folder, oracle, **on)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (RequestExtras(bias=np.zeros(5, np.float32)), "embedding_bias has 5 numbers, the vocabulary 512"),
        (RequestExtras(bad_words=((3, 512),)), "bad_words_list has a token that is not in the vocabulary"),
    ],
)
@pytest.mark.long
def test_what_the_vocabulary_does_not_have(
    extras: RequestExtras, message: str, folder: Path, on: dict[str, Any]
) -> None:
    answers(core := make_core(folder, **on), {0: extras})
    assert message in extras.error and not core.has_work()


@pytest.mark.long
def test_more_rows_than_are_chosen_at_once(folder: Path, oracle: Oracle, on: dict[str, Any]) -> None:
    """A step's choice goes in pieces: each adjusts its own rows, a search takes its beams out of several."""
    core = make_core(folder, **on)
    core.engine.worker.chooser.max_rows = 2
    extras_by_id = {
        0: RequestExtras(repetition_penalty=1.7),
        1: RequestExtras(beam_width=4, ends=(), keeps_context_logits=True),
        3: RequestExtras(bad_words=((8,),), keeps_generation_logits=True),
    }
    found = answers(core, extras_by_id, min_output=[0, 0, 4, 0])
    assert found[0] == oracle.tokens(PROMPTS[0], N_OUTPUT, repetition_penalty=1.7)
    assert extras_by_id[1].beams is not None
    beams = [beam.tokens for beam in extras_by_id[1].beams.answers()]
    assert beams == [tokens for tokens, _ in oracle.beams(PROMPTS[1], N_OUTPUT, 4)]
    context = torch.from_numpy(np.concatenate(extras_by_id[1].context_logits))
    torch.testing.assert_close(context, oracle.logits(PROMPTS[1]), atol=1e-4, rtol=1e-4)
    assert found[2] == oracle.tokens(PROMPTS[2], N_OUTPUT)
    assert found[3] == oracle.tokens(PROMPTS[3], N_OUTPUT, bad_words_ids=[[8]])
    assert len(extras_by_id[3].generation_logits) == N_OUTPUT


def counted_anew(extras: RequestExtras, logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Return logits with the penalties of all `tokens`."""
    seen, counts = (torch.from_numpy(x) for x in np.unique(tokens, return_counts=True))
    changed, of_seen, penalty = logits.clone(), logits[seen], extras.repetition_penalty
    of_seen = torch.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
    changed[seen] = of_seen - extras.presence_penalty - extras.frequency_penalty * counts
    return changed


@pytest.mark.parametrize("beam_width", [1, 3])
def test_penalties_have_the_bits_of_a_count_of_all_tokens(beam_width: int) -> None:
    """The prompt is counted once; beams change places."""
    random = torch.Generator().manual_seed(1)
    prompt = torch.randint(50, (400,), generator=random).tolist()
    extras = RequestExtras(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, beam_width=beam_width
    )
    sequence = Sequence(0, prompt.copy(), 64, 0, SamplingParams())
    extras.prepare(sequence, set(), tokens_per_block=8)
    for step in range(12):
        beams = [sequence.output] if extras.beams is None else [b.tokens for b in extras.beams.running]
        for beam, output in enumerate(beams):
            logits = torch.randn(64, generator=random)
            wanted = counted_anew(extras, logits, prompt + output)
            extras._adjust(sequence, beam, logits)
            assert torch.equal(logits, wanted)
        sequence.prompt.clear()
        sequence.output.append(7 * step % 64)
