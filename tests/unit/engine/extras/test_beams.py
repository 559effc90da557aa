"""Beam search in the torch core's cache against transformers' `generate(num_beams=…)`, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpillm.engine.extras.request_extras import RequestExtras
from tests.helpers.extras_checks import (
    AS_ON_A_GPU,
    BEAM_PROMPTS,
    N_BEAM_OUTPUT,
    beam_answers,
    check_beams_beside_others,
    check_beams_that_end,
)
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import make_batch, make_core


@pytest.mark.long
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
    assert ("kv_cache_tokens" in options) == (check_beams_beside_others(folder, oracle, **options) > 0)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5, 2.0])
@pytest.mark.long
def test_end_tokens(early: bool, penalty: float, folder: Path, oracle: Oracle) -> None:
    check_beams_that_end(folder, oracle, early, penalty)


@pytest.mark.long
@pytest.mark.parametrize("n_tokens", [None, 280])
def test_as_on_a_gpu(n_tokens: int | None, folder: Path, oracle: Oracle) -> None:
    """There tables of blocks have the width of a longest sequence, and tokens come late."""
    scarce: dict[str, Any] = {"max_seq_len": 80, "kv_cache_tokens": n_tokens, "max_batch_size": 12}
    check_beams_beside_others(folder, oracle, AS_ON_A_GPU, **(scarce if n_tokens else {}))


def test_forks_share_full_blocks(folder: Path) -> None:
    """Only the last block of a beam is copied; the blocks of the prompt exist once."""
    core = make_core(folder)
    extras = RequestExtras(beam_width=4, ends=())
    core.enqueue_with_extras(make_batch([BEAM_PROMPTS[1]], max_output=N_BEAM_OUTPUT), {0: extras})
    total = core.engine.blocks.n_free
    copied = 0
    while core.has_work():
        core.poll_responses()
        if extras.beams is None or not extras.beams._tables or extras.beams.is_done:
            continue
        tables = extras.beams._tables
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
    extras = RequestExtras(beam_width=4)
    beam_answers(core, [BEAM_PROMPTS[0]], {0: extras})
    assert message in extras.error


def test_cancelled(folder: Path) -> None:
    core = make_core(folder)
    free = core.engine.blocks.n_free
    extras = RequestExtras(beam_width=4, ends=())
    core.enqueue_with_extras(make_batch([BEAM_PROMPTS[0]], max_output=N_BEAM_OUTPUT), {0: extras})
    for _ in range(4):
        core.poll_responses()
    core.cancel([0])
    while core.has_work():
        core.poll_responses()
    assert extras.beams is not None and 0 < len(extras.beams.answers()[0].tokens) < N_BEAM_OUTPUT
    assert core.engine.blocks.n_free == free
    assert beam_answers(core, [BEAM_PROMPTS[0]], {}) == beam_answers(
        make_core(folder), [BEAM_PROMPTS[0]], {}
    ), "its slots are free"
