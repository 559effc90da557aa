"""Prompts of traces: their lengths, and the blocks that they share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpillm.data.records import Trace
from mpillm.data.tokenizer import load_tokenizer
from mpillm.data.traces import trace_text, trace_tokens
from tests.helpers.make_checkpoint import make_tokenizer


def test_a_text_has_the_length_and_shares_what_the_tokens_share(tmp_path: Path) -> None:
    """Cut after its last token, which may be half a character."""
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    one, two = (trace_text(Trace(n, ids), tokenizer, 0) for n, ids in ((600, (1, 2)), (900, (1, 3))))
    first, second = tokenizer.encode_plain(one), tokenizer.encode_plain(two)
    assert len(first) == pytest.approx(600, rel=0.02) and len(second) == pytest.approx(900, rel=0.02)
    n_shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert n_shared == pytest.approx(512, rel=0.02)


def test_only_blocks_without_hashes_depend_on_the_sample(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    one, two = (trace_tokens(Trace(1000, (7,)), tokenizer, 300, sample) for sample in (1, 2))
    assert len(one) == len(two) == 1000
    assert np.array_equal(one[:512], two[:512]) and not np.array_equal(one[512:], two[512:])
