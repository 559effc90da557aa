"""Batches and their form on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm.messages import REQUEST, RESPONSE, Batch, Kind, concat, ragged_take


def batch(lengths: list[int], dtype: np.dtype = REQUEST, seed: int = 0) -> Batch:
    """Rows with random fields and these numbers of tokens."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (len(lengths), dtype.itemsize), np.uint8).view(dtype)[:, 0].copy()
    rows["n_tokens"] = lengths
    return Batch(rows, random.integers(-(2**31), 2**31, sum(lengths), np.int64).astype(np.int32))


def equal(a: Batch, b: Batch) -> bool:
    return a.rows.dtype == b.rows.dtype and a.rows.tobytes() == b.rows.tobytes() and a.tokens.tolist() == b.tokens.tolist()


@given(st.lists(st.integers(0, 9), max_size=20), st.sampled_from([REQUEST, RESPONSE]), st.integers(0, 2**62))
def test_what_is_packed_is_unpacked(lengths: list[int], dtype: np.dtype, sequence: int) -> None:
    made = batch(lengths, dtype)
    assert made.kind == (Kind.REQUESTS if dtype == REQUEST else Kind.RESPONSES)
    assert len(made) == len(lengths)
    unpacked, number = Batch.unpack(made.pack(sequence))
    assert equal(made, unpacked)
    assert number == sequence


def test_unpacking_makes_views() -> None:
    buffer = batch([3, 4]).pack()
    unpacked, _ = Batch.unpack(buffer)
    assert np.shares_memory(unpacked.rows, buffer)
    assert np.shares_memory(unpacked.tokens, buffer)


@pytest.mark.parametrize("change", [lambda b: b[:-4], lambda b: np.concatenate([b, np.zeros(4, np.uint8)]), lambda b: b[:40]])
def test_a_buffer_of_another_size_is_refused(change: object) -> None:
    with pytest.raises(ValueError, match="rows"):
        Batch.unpack(change(batch([3, 4]).pack()))  # type: ignore[operator]


def test_an_unknown_kind_is_refused() -> None:
    buffer = batch([3]).pack()
    buffer[0] = 77
    with pytest.raises(ValueError, match="77"):
        Batch.unpack(buffer)


def test_offsets() -> None:
    assert batch([3, 0, 4]).offsets().tolist() == [0, 3, 3, 7]
    assert batch([]).offsets().tolist() == [0]


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=5))
def test_concat(parts: list[list[int]]) -> None:
    batches = [batch(lengths, seed=i) for i, lengths in enumerate(parts)]
    joined = concat(batches)
    assert joined.rows["n_tokens"].tolist() == [n for lengths in parts for n in lengths]
    assert joined.tokens.tolist() == [token for b in batches for token in b.tokens.tolist()]
    assert joined.rows.tobytes() == b"".join(b.rows.tobytes() for b in batches)


@given(st.data())
def test_ragged_take(data: st.DataObject) -> None:
    tokens = np.arange(50, dtype=np.int32)
    pieces = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=8))
    starts = np.array([s for s, _ in pieces], np.int64)
    lengths = np.array([n for _, n in pieces], np.int64)
    taken = ragged_take(tokens, starts, lengths)
    assert taken.tolist() == [t for s, n in pieces for t in range(s, s + n)]
    assert taken.dtype == np.int32
