"""Beam search in the torch core's cache against transformers' `generate(num_beams=…)`, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpillm.cores.torch_core import TorchCore
from mpillm.engine.extras.special import Special
from tests.helpers.gpu_steps_on_cpu import compute_as_on_a_gpu
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import answer_specials, make_batch, make_core

# In blocks of 8: less than one, several and a part, exactly two, one token.
PROMPTS = [[5, 6, 7], [100 + i for i in range(43)], [8, 9] * 8, [11]]
N_OUTPUT = 20


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_as_on_a_gpu(monkeypatch)


def run(core: TorchCore, prompts: list[list[int]], specials: dict[int, Special]) -> list[list[int]]:
    return answer_specials(core, prompts, specials, N_OUTPUT)


def check(special: Special, oracle: Oracle, prompt: list[int]) -> None:
    assert special.beams is not None
    found = special.beams.answers()
    wanted = oracle.beams(
        prompt,
        N_OUTPUT,
        special.beam_width,
        special.ends or (),
        length_penalty=special.length_penalty,
        early_stopping=special.early_stopping,
    )
    assert [beam.tokens for beam in found] == [tokens for tokens, _ in wanted]
    assert [beam.score for beam in found] == pytest.approx([score for _, score in wanted], abs=1e-4)
    for beam in found:
        assert beam.sum == pytest.approx(sum(beam.logprobs), abs=1e-4)
        assert beam.score == pytest.approx(beam.sum / len(beam.tokens) ** special.length_penalty, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 16, "enable_kv_cache_reuse": True},
        {"batch_scheduler_policy": "no_evict"},
        {"batch_scheduler_policy": "static", "max_batch_size": 8},
        {"max_seq_len": 80, "kv_cache_tokens": 280, "max_batch_size": 12},
    ],
    ids=["plain", "chunked-reuse", "no-evict", "static", "evicting"],
)
def test_beside_others(options: dict[str, Any], folder: Path, oracle: Oracle) -> None:
    """Beams of widths 2 to 4 are those of transformers beside greedy requests, also when these are
    evicted."""
    assert ("kv_cache_tokens" in options) == (check_beside_others(options, folder, oracle) > 0)


def check_beside_others(options: dict[str, Any], folder: Path, oracle: Oracle) -> float:
    """Return how often greedy requests were evicted."""
    core = make_core(folder, **options)
    greedy = run(make_core(folder), PROMPTS, {})
    free = core.engine.blocks.n_free
    for _ in range(2):
        specials = {2 * i: Special(beam_width=width) for i, width in enumerate((4, 3, 2, 4))}
        for special in specials.values():
            special.ends = ()
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        answers = run(core, prompts, specials)
        for i, special in specials.items():
            check(special, oracle, prompts[i])
            assert answers[i] == special.beams.answers()[0].tokens  # type: ignore[union-attr]
        assert answers[1::2] == greedy
        assert core.engine.blocks.n_free == free and not core.has_work()
    return core.statistics()["preemptions"]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5, 2.0])
def test_end_tokens(early: bool, penalty: float, folder: Path, oracle: Oracle) -> None:
    """Beams end at the same tokens as those of transformers, with many lengths of answers."""
    ends = tuple(range(0, 512, 4))
    lengths = set()
    for prompt in PROMPTS:
        special = Special(beam_width=3, ends=ends, length_penalty=penalty, early_stopping=early)
        run(make_core(folder), [prompt], {0: special})
        check(special, oracle, prompt)
        assert special.beams is not None
        lengths |= {len(beam.tokens) for beam in special.beams.answers()}
    assert len(lengths) > 1 or early or penalty > 1, "a large penalty prefers long answers"


@pytest.mark.long
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("n_tokens", [None, 280])
def test_as_on_a_gpu(n_tokens: int | None, folder: Path, oracle: Oracle) -> None:
    """There tables of blocks have the width of a longest sequence, and tokens come late."""
    scarce = {"max_seq_len": 80, "kv_cache_tokens": n_tokens, "max_batch_size": 12}
    check_beside_others({} if n_tokens is None else scarce, folder, oracle)


def test_forks_share_full_blocks(folder: Path) -> None:
    """Only the last block of a beam is copied; the blocks of the prompt exist once."""
    core = make_core(folder)
    special = Special(beam_width=4, ends=())
    core.enqueue_special(make_batch([PROMPTS[1]], max_output=N_OUTPUT), {0: special})
    total = core.engine.blocks.n_free
    copied = 0
    while core.has_work():
        core.poll_responses()
        if special.beams is None or not special.beams._tables or special.beams.is_done:
            continue
        tables = special.beams._tables
        assert all(table[:5] == tables[0][:5] for table in tables), "43 tokens: five full blocks"
        assert len({table[-1] for table in tables}) == 4, "nobody writes to another's block"
        copied = max(copied, total - core.engine.blocks.n_free)
    assert copied == 5 + 4 * (8 - 5), "of 62 tokens"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_cache_tokens": 64, "max_seq_len": 64},
            "beam_width 4 needs 96 tokens of KV cache, of which there are 64",
        ),
        ({"max_batch_size": 3}, "beam_width 4 exceeds max_batch_size 3"),
    ],
)
def test_no_room(options: dict[str, Any], message: str, folder: Path) -> None:
    core = make_core(folder, **options)
    special = Special(beam_width=4)
    run(core, [PROMPTS[0]], {0: special})
    assert message in special.error


def test_cancelled(folder: Path) -> None:
    core = make_core(folder)
    free = core.engine.blocks.n_free
    special = Special(beam_width=4, ends=())
    core.enqueue_special(make_batch([PROMPTS[0]], max_output=N_OUTPUT), {0: special})
    for _ in range(4):
        core.poll_responses()
    core.cancel([0])
    while core.has_work():
        core.poll_responses()
    assert special.beams is not None and 0 < len(special.beams.answers()[0].tokens) < N_OUTPUT
    assert core.engine.blocks.n_free == free
    assert run(core, [PROMPTS[0]], {}) == run(make_core(folder), [PROMPTS[0]], {}), "its slots are free"
