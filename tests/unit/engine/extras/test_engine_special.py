"""Logits, penalties and forbidden words of the torch core against transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.cores.torch_core import TorchCore
from mpillm.engine.extras.special import Special
from mpillm.engine.run import worker as worker_module
from tests.helpers.gpu_steps_on_cpu import compute_as_on_a_gpu
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import answer_specials, make_core

PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9], [8, 8, 8, 8]]
N_OUTPUT = 9


@pytest.fixture(params=["cpu", "as on a gpu"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "cpu":
        compute_as_on_a_gpu(monkeypatch)


def answers(core: TorchCore, specials: dict[int, Special], **fields: Any) -> list[list[int]]:
    return answer_specials(core, PROMPTS, specials, N_OUTPUT, **fields)


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
def test_logits(core_options: dict[str, Any], folder: Path, oracle: Oracle) -> None:
    """Logits of prompts and answers are those of transformers, also when blocks are known from an earlier
    request."""
    core = make_core(folder, **core_options)
    for _ in range(2):
        specials = {i: Special(keeps_context_logits=i != 2, keeps_generation_logits=True) for i in (0, 1, 2)}
        tokens = answers(core, specials)
        for i, special in specials.items():
            expected = oracle.logits(PROMPTS[i] + tokens[i])
            n = len(PROMPTS[i])
            torch.testing.assert_close(
                torch.from_numpy(np.stack(special.generation_logits)),
                expected[n - 1 : -1],
                atol=1e-4,
                rtol=1e-4,
            )
            if special.keeps_context_logits:
                torch.testing.assert_close(
                    torch.from_numpy(np.concatenate(special.context_logits)),
                    expected[:n],
                    atol=1e-4,
                    rtol=1e-4,
                )
    assert ("kv_cache_tokens" in core_options) == (core.statistics()["preemptions"] > 0)


def test_bad_words_and_repetition(folder: Path, oracle: Oracle) -> None:
    plain = answers(make_core(folder), {})
    assert plain == [oracle.tokens(prompt, N_OUTPUT) for prompt in PROMPTS]
    # What each would say: a token, two in a row, the first one behind the prompt's last. The prompt has more
    # tokens than the word, which transformers 5.17 passes over otherwise.
    bad = {
        0: ((plain[0][0],),),
        1: ((plain[1][2], plain[1][3]),),
        3: ((PROMPTS[3][-1], plain[3][0]), (plain[3][4],)),
    }
    specials = {i: Special(bad_words=words) for i, words in bad.items()}
    specials[2] = Special(repetition_penalty=1.7)
    ours = answers(make_core(folder), specials)
    for i, words in bad.items():
        expected = oracle.tokens(PROMPTS[i], N_OUTPUT, bad_words_ids=[list(word) for word in words])
        assert ours[i] == expected != plain[i]
    assert ours[2] == oracle.tokens(PROMPTS[2], N_OUTPUT, repetition_penalty=1.7)


def test_presence_frequency_bias_and_an_end_that_may_not_come_yet(folder: Path, oracle: Oracle) -> None:
    bias = np.zeros(512, np.float32)
    bias[77] = 100
    plain = answers(make_core(folder), {})
    specials = {
        0: Special(presence_penalty=1.5, frequency_penalty=0.75),
        1: Special(bias=bias, presence_penalty=100.0),
        2: Special(not_yet=(plain[2][1], 100_000)),
    }
    ours = answers(make_core(folder), specials, min_output=[0, 0, 3, 0])
    for i in (0, 1):
        special, tokens = specials[i], list(PROMPTS[i])
        for _ in range(N_OUTPUT):
            logits = oracle.logits(tokens)[-1].clone()
            if special.bias is not None:
                logits += torch.from_numpy(special.bias)
            counts = torch.bincount(torch.tensor(tokens), minlength=len(logits))
            logits -= special.frequency_penalty * counts + special.presence_penalty * (counts > 0)
            tokens.append(int(logits.argmax()))
        assert ours[i] == tokens[len(PROMPTS[i]) :]
    assert 77 in ours[1] and ours[1].count(77) == 1
    assert plain[2][1] not in ours[2][:3] and ours[3] == plain[3]


@pytest.mark.parametrize(
    ("special", "message"),
    [
        (Special(bias=np.zeros(5, np.float32)), "embedding_bias has 5 numbers, the vocabulary 512"),
        (Special(bad_words=((3, 512),)), "bad_words_list has a token that is not in the vocabulary"),
    ],
)
def test_what_the_vocabulary_does_not_have(special: Special, message: str, folder: Path) -> None:
    answers(core := make_core(folder), {0: special})
    assert message in special.error and not core.has_work()


def test_more_rows_than_are_chosen_at_once(
    folder: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's choice goes in pieces: each adjusts its own rows, a search takes its beams out of several."""
    monkeypatch.setattr(worker_module, "CHOSEN_AT_ONCE", 2)
    specials = {
        0: Special(repetition_penalty=1.7),
        1: Special(beam_width=4, ends=(), keeps_context_logits=True),
        3: Special(bad_words=((8,),), keeps_generation_logits=True),
    }
    found = answers(make_core(folder), specials, min_output=[0, 0, 4, 0])
    assert found[0] == oracle.tokens(PROMPTS[0], N_OUTPUT, repetition_penalty=1.7)
    assert specials[1].beams is not None
    beams = [beam.tokens for beam in specials[1].beams.answers()]
    assert beams == [tokens for tokens, _ in oracle.beams(PROMPTS[1], N_OUTPUT, 4)]
    context = torch.from_numpy(np.concatenate(specials[1].context_logits))
    torch.testing.assert_close(context, oracle.logits(PROMPTS[1]), atol=1e-4, rtol=1e-4)
    assert found[2] == oracle.tokens(PROMPTS[2], N_OUTPUT)
    assert found[3] == oracle.tokens(PROMPTS[3], N_OUTPUT, bad_words_ids=[[8]])
    assert len(specials[3].generation_logits) == N_OUTPUT
