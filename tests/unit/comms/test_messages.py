"""Batches and their form on the wire."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm.comms import messages
from mpillm.comms.messages import (
    NO_SLOT,
    REQUEST,
    RESPONSE,
    Arrival,
    Batch,
    Beat,
    Event,
    Grant,
    InstanceLoss,
    Message,
    Release,
    Stop,
    StoppedRank,
    concat,
    index_of,
    ragged_take,
)
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Envelope
from mpillm.errors import Failure


def batch(lengths: list[int], dtype: np.dtype = REQUEST, seed: int = 0) -> Batch:
    """Return rows with random fields and these numbers of tokens."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (len(lengths), dtype.itemsize), np.uint8).view(dtype)[:, 0].copy()
    rows["n_tokens"] = lengths
    return Batch(rows, random.integers(-(2**31), 2**31, sum(lengths), np.int64).astype(np.int32))


def equal(a: Batch, b: Batch) -> bool:
    return (
        a.rows.dtype == b.rows.dtype
        and a.rows.tobytes() == b.rows.tobytes()
        and a.tokens.tolist() == b.tokens.tolist()
    )


@given(st.lists(st.integers(0, 9), max_size=20), st.sampled_from([REQUEST, RESPONSE]))
def test_what_is_packed_is_unpacked(lengths: list[int], dtype: np.dtype) -> None:
    made = batch(lengths, dtype)
    assert len(made) == len(lengths)
    assert equal(made, Batch.unpack(made.pack(), dtype))


def test_unpacking_makes_views() -> None:
    buffer = batch([3, 4]).pack()
    unpacked = Batch.unpack(buffer, REQUEST)
    assert np.shares_memory(unpacked.rows, buffer)
    assert np.shares_memory(unpacked.tokens, buffer)


@pytest.mark.parametrize(
    "change", [lambda b: b[:-4], lambda b: np.concatenate([b, np.zeros(4, np.uint8)]), lambda b: b[:40]]
)
def test_a_buffer_of_another_size_is_refused(change: object) -> None:
    with pytest.raises(ValueError, match="rows"):
        Batch.unpack(change(batch([3, 4]).pack()), REQUEST)  # type: ignore[operator]


def test_responses_are_not_read_as_requests() -> None:
    with pytest.raises(ValueError, match="rows"):
        Batch.unpack(batch([3], RESPONSE).pack(), REQUEST)


# Of every tag of the control and route communicators, values as they are sent.
SENT: dict[Tag, list[Any]] = {
    Tag.BEAT: [Beat("load", 0.5, ""), Beat("test", 3.25, "File …", (1.5, None))],
    Tag.ARRIVED: [Arrival("load", None), Arrival("join", {"host": "a", "pid": 3})],
    Tag.RELEASE: [Release("load", None), Release("stop", 4)],
    Tag.FAILED: [Failure("broken", 3, "Traceback …", 5, interrupted=True)],
    Tag.STOP: [Stop(4, True), Stop(143, False)],
    Tag.BYE: [None],
    Tag.RESET_CACHE: [None],
    Tag.LOST: [InstanceLoss(1, (4, 5))],
    Tag.QUERY: [batch([3, 0, 4])],
    Tag.WORK: [batch([1])],
    Tag.DONE: [batch([3, 0, 4], RESPONSE)],
    Tag.ANSWER: [batch([], RESPONSE)],
    Tag.GRANT: [Grant(8, 2**40)],
    Tag.WINDOW: [2048],
    Tag.CANCEL: [[0, 2**32 - 1], []],
    Tag.DROP: [[7]],
    Tag.EVENT: [Event("lost", "server 1 was ended by signal 9")],
    Tag.STOPPED: [StoppedRank(3, "is stopped: kill -CONT 7")],
    Tag.SETTLE: [[[7, 1], [2**32 - 1, 0]]],
    Tag.OFFER: [batch([5, 6])],
    Tag.ACCEPT: [[[7, 255]], [[1, NO_SLOT], [2**32 - 1, 0]]],
    Tag.FIRST: [[[7, 31999, -1]], []],
    Tag.WARM_UP: [0],
}
MESSAGES = {made.tag: made for made in vars(messages).values() if isinstance(made, Message)}


OF_THE_DOCTOR = (Tag.FACTS, Tag.ORDER, Tag.RESULTS)  # mpillm/doctor/exam.py


def test_each_tag_of_control_and_route_is_described_once() -> None:
    described = [made.tag for made in vars(messages).values() if isinstance(made, Message)]
    assert (
        sorted(described)
        == sorted(SENT)
        == [tag for tag in Tag if tag < Tag.PLAN and tag not in OF_THE_DOCTOR]
    )


@pytest.mark.parametrize("tag", SENT, ids=lambda tag: tag.name)
def test_a_message_is_read_as_it_was_written(tag: Tag) -> None:
    """Value and type are the same, whether a message is handled in turn or taken out of turn."""
    sent: list[Envelope] = []
    transport: Any = SimpleNamespace(
        handlers={},
        send=lambda dest, tag, buffer: sent.append(Envelope(dest, tag, buffer)),
        take=lambda source, tag, tries: next(
            (one for one in sent if (one.source, one.tag) == (source, tag)), None
        ),
    )
    got: list[tuple[int, Any]] = []
    message = MESSAGES[tag]
    message.handle(transport, lambda source, value: got.append((source, value)))
    assert message.take(transport, 3) is None
    for value in SENT[tag]:
        message.send(transport, 3, value)
        assert sent[-1].buffer.dtype == np.uint8
        transport.handlers[tag](sent[-1])
        source, read = got[-1]
        assert source == 3 and type(read) is type(value)
        assert equal(read, value) if isinstance(value, Batch) else read == value
    taken, first = message.take(transport, 3), SENT[tag][0]
    assert equal(taken, first) if isinstance(taken, Batch) else taken == first


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


@pytest.mark.parametrize("ids", [[], [3], [2, 0], [1, 1]])
def test_index_of_picks_the_same_places(ids: list[int]) -> None:
    wanted, places = np.array(ids, np.uint32), np.arange(10, 14)
    assert places[index_of(wanted)].tolist() == places[wanted].tolist()
    places[index_of(wanted)] = 7
    assert [i for i, place in enumerate(places.tolist()) if place == 7] == sorted(set(ids))
