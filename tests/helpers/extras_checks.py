"""Checks of what few requests ask for, against transformers: logits, penalties, forbidden words, beams.

`core_options` of each say how the engine computes, with `ON_GPU` on the first GPU, with
`AS_ON_A_GPU` by its steps on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.cores.torch_core import TorchCore
from mpillm.engine.extras.request_extras import RequestExtras
from tests.helpers.families import make_family
from tests.helpers.gpu_steps_on_cpu import LateGpuCore
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import answer_with_extras, make_core

ON_GPU: dict[str, Any] = {"gpu_bytes": 8 << 30, "gpu": 0}
AS_ON_A_GPU: dict[str, Any] = {"kind": LateGpuCore}
PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9], [8, 8, 8, 8]]  # one is longer than windows
N_OUTPUT = 9
# In blocks of 8: less than one, several and a part, exactly two, one token.
BEAM_PROMPTS = [[5, 6, 7], [100 + i for i in range(43)], [8, 9] * 8, [11]]
N_BEAM_OUTPUT = 20


def answers(core: TorchCore, extras_by_id: dict[int, RequestExtras], **fields: Any) -> list[list[int]]:
    return answer_with_extras(core, PROMPTS, extras_by_id, N_OUTPUT, **fields)


def beam_answers(
    core: TorchCore, prompts: list[list[int]], extras_by_id: dict[int, RequestExtras]
) -> list[list[int]]:
    return answer_with_extras(core, prompts, extras_by_id, N_BEAM_OUTPUT)


def check_logits(folder: Path, oracle: Oracle, **core_options: Any) -> None:
    """Logits of prompts and answers are those of transformers, also when blocks are known from an earlier
    request."""
    core = make_core(folder, **core_options)
    for _ in range(2):
        extras_by_id = {
            i: RequestExtras(keeps_context_logits=i != 2, keeps_generation_logits=True) for i in (0, 1, 2)
        }
        tokens = answers(core, extras_by_id)
        for i, extras in extras_by_id.items():
            expected = oracle.logits(PROMPTS[i] + tokens[i])
            n = len(PROMPTS[i])
            torch.testing.assert_close(
                torch.from_numpy(np.stack(extras.generation_logits)),
                expected[n - 1 : -1],
                atol=1e-4,
                rtol=1e-4,
            )
            if extras.keeps_context_logits:
                torch.testing.assert_close(
                    torch.from_numpy(np.concatenate(extras.context_logits)),
                    expected[:n],
                    atol=1e-4,
                    rtol=1e-4,
                )
    assert ("kv_cache_tokens" in core_options) == (core.statistics()["preemptions"] > 0)


def check_bad_words_and_repetition(folder: Path, oracle: Oracle, **core_options: Any) -> None:
    plain = answers(make_core(folder, **core_options), {})
    assert plain == [oracle.tokens(prompt, N_OUTPUT) for prompt in PROMPTS]
    # What each would say: a token, two in a row, the first one behind the prompt's last. The prompt has more
    # tokens than the word, which transformers 5.17 passes over otherwise.
    bad = {
        0: ((plain[0][0],),),
        1: ((plain[1][2], plain[1][3]),),
        3: ((PROMPTS[3][-1], plain[3][0]), (plain[3][4],)),
    }
    extras_by_id = {i: RequestExtras(bad_words=words) for i, words in bad.items()}
    extras_by_id[2] = RequestExtras(repetition_penalty=1.7)
    ours = answers(make_core(folder, **core_options), extras_by_id)
    for i, words in bad.items():
        expected = oracle.tokens(PROMPTS[i], N_OUTPUT, bad_words_ids=[list(word) for word in words])
        assert ours[i] == expected != plain[i]
    assert ours[2] == oracle.tokens(PROMPTS[2], N_OUTPUT, repetition_penalty=1.7)


def check_presence_frequency_bias_and_minimum(folder: Path, oracle: Oracle, **core_options: Any) -> None:
    bias = np.zeros(512, np.float32)
    bias[77] = 100
    plain = answers(make_core(folder, **core_options), {})
    extras_by_id = {
        0: RequestExtras(presence_penalty=1.5, frequency_penalty=0.75),
        1: RequestExtras(bias=bias, presence_penalty=100.0),
        2: RequestExtras(not_yet=(plain[2][1], 100_000)),
    }
    ours = answers(make_core(folder, **core_options), extras_by_id, min_output=[0, 0, 3, 0])
    for i in (0, 1):
        extras, tokens = extras_by_id[i], list(PROMPTS[i])
        for _ in range(N_OUTPUT):
            logits = oracle.logits(tokens)[-1].clone()
            if extras.bias is not None:
                logits += torch.from_numpy(extras.bias)
            counts = torch.bincount(torch.tensor(tokens), minlength=len(logits))
            logits -= extras.frequency_penalty * counts + extras.presence_penalty * (counts > 0)
            tokens.append(int(logits.argmax()))
        assert ours[i] == tokens[len(PROMPTS[i]) :]
    assert 77 in ours[1] and ours[1].count(77) == 1
    assert plain[2][1] not in ours[2][:3] and ours[3] == plain[3]


def check_beams(extras: RequestExtras, oracle: Oracle, prompt: list[int]) -> None:
    assert extras.beams is not None
    found = extras.beams.answers()
    wanted = oracle.beams(
        prompt,
        N_BEAM_OUTPUT,
        extras.beam_width,
        extras.ends or (),
        length_penalty=extras.length_penalty,
        early_stopping=extras.early_stopping,
    )
    assert [beam.tokens for beam in found] == [tokens for tokens, _ in wanted]
    assert [beam.score for beam in found] == pytest.approx([score for _, score in wanted], abs=1e-4)
    for beam in found:
        assert beam.sum == pytest.approx(sum(beam.logprobs), abs=1e-4)
        assert beam.score == pytest.approx(beam.sum / len(beam.tokens) ** extras.length_penalty, abs=1e-4)


def check_beams_beside_others(
    folder: Path, oracle: Oracle, on: Mapping[str, Any] = {}, **core_options: Any
) -> float:
    """Check both against transformers and each alone; return how often greedy requests were evicted."""
    core = make_core(folder, **on, **core_options)
    greedy = beam_answers(make_core(folder, **on), BEAM_PROMPTS, {})
    free = core.engine.blocks.n_free
    for _ in range(2):
        extras_by_id = {2 * i: RequestExtras(beam_width=width) for i, width in enumerate((4, 3, 2, 4))}
        for extras in extras_by_id.values():
            extras.ends = ()
        prompts = [prompt for prompt in BEAM_PROMPTS for _ in range(2)]
        found = beam_answers(core, prompts, extras_by_id)
        for i, extras in extras_by_id.items():
            check_beams(extras, oracle, prompts[i])
            assert found[i] == extras.beams.answers()[0].tokens  # type: ignore[union-attr]
        assert found[1::2] == greedy
        assert core.engine.blocks.n_free == free and not core.has_work()
    return core.statistics()["preemptions"]


def check_beams_that_end(
    folder: Path, oracle: Oracle, early: bool, penalty: float, **core_options: Any
) -> None:
    """Beams end at the same tokens as those of transformers, with many lengths of answers."""
    ends = tuple(range(0, 512, 4))
    lengths = set()
    for prompt in BEAM_PROMPTS:
        extras = RequestExtras(beam_width=3, ends=ends, length_penalty=penalty, early_stopping=early)
        beam_answers(make_core(folder, **core_options), [prompt], {0: extras})
        check_beams(extras, oracle, prompt)
        assert extras.beams is not None
        lengths |= {len(beam.tokens) for beam in extras.beams.answers()}
    assert len(lengths) > 1 or early or penalty > 1, "a large penalty prefers long answers"


def check_family_logits(name: str, folder: Path, **core_options: Any) -> float:
    """Check the logits behind each token of prompts and of their answers; return the largest difference."""
    make_family(name, folder)
    oracle, prompts = Oracle(folder), PROMPTS[:3]
    extras_list = [RequestExtras(keeps_context_logits=True, keeps_generation_logits=True) for _ in prompts]
    core = make_core(folder, dtype="float32", **core_options)
    found_tokens = answer_with_extras(core, prompts, dict(enumerate(extras_list)), N_OUTPUT)
    worst = 0.0
    for prompt, answer, extras in zip(prompts, found_tokens, extras_list, strict=True):
        expected = oracle.logits(prompt + answer)[:-1]
        found = np.concatenate([*extras.context_logits, np.stack(extras.generation_logits)[1:]])
        assert found.shape == tuple(expected.shape)
        worst = max(worst, float((torch.from_numpy(found) - expected).norm() / expected.norm()))
    assert worst < 1e-5
    return worst
