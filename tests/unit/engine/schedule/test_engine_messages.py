"""Every tag of the engine has a message, and a message is read as it was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mpillm.comms.messages import Message
from mpillm.comms.tags import Tag
from mpillm.engine.parallel.groups import HIDDEN
from mpillm.engine.schedule import engine_messages
from mpillm.engine.schedule.engine_messages import Notice, PutTarget
from mpillm.engine.schedule.host_blocks import BlockCopy
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.schedule.transfer import Kind, Transfer

TRANSFERS = [
    Transfer(Kind.SEND, 7, 3, 255, 33, [5, 1, 9]),
    Transfer(Kind.RECEIVE, 2**31 - 1, 0, 0, 9, [2, 3], [0, 7]),
    Transfer(Kind.SEND_LAYERS, 9, 1, 2, 0, []),
]
SPANS = [
    Span(3, 40, 1, 2, [17], n_window_blocks_sent=3, window_blocks=[8]),
    Span(0, 9, 1, 1),
    Span(5, 0, 4, 0, [4, 2], window_blocks=[0, 6]),
]
GUESSED = Step([Span(1, 7, 3, 2, [8], is_few=True), Span(0, 3, 2, 1)], [5, 6, 7, 8, 9], [0, 1, 2, 4], [0, 1])
GREEDY = Step(SPANS, [-1, 7, 8, 9, 10, 11], [0, 5], [1])
SAMPLED = Step(
    SPANS[:1],
    [31999],
    [0],
    [],
    [SamplingParams(0.5, 7, 0.25, 2**32 - 1)],
    [12],
    TRANSFERS[:1],
)
WITH_EXTRAS = [
    Step(
        SPANS,
        [-1, 7, 8, 9, 10, 11],
        [0, 5],
        [1],
        [SamplingParams(0.5, 7)] * 2,
        [4, 0],
        extras=bytes(range(8)),
    ),
    Step(SPANS[:1], [31999], [0], extras=b""),
]
SENT: dict[Tag, list[Any]] = {
    Tag.PLAN: [
        GREEDY,
        SAMPLED,
        GUESSED,
        Step(transfers=TRANSFERS),
        Step(SPANS[2:], [1, 2, 3, 4], copies=[BlockCopy(5, 2, False), BlockCopy(6, 9, True)]),
        Step(SPANS[2:], [1, 2, 3, 4], logprobs=21),
        *WITH_EXTRAS,
    ],
    Tag.TOKENS: [[0, 128255], []],
    Tag.MOVED: [[2**31 - 1], []],
    Tag.NCCL_ID: [bytes(range(128))],
    Tag.NOTICE: [[Notice(Tag.KV + 255, 2**40), Notice(Tag.KV, 0)], []],
    Tag.TARGETS: [[PutTarget(Tag.KV + 7, 3, 1, 40, [5, 1], (0, 3)), PutTarget(Tag.KV, 0, 0, 1, [9])], []],
    Tag.PUT: [[Tag.KV + 7, Tag.KV], []],
}
MESSAGES: dict[Tag, Message[Any]] = {
    value.tag: value for value in vars(engine_messages).values() if isinstance(value, Message)
}


def test_every_tag_has_a_message() -> None:
    assert sorted(MESSAGES) == sorted(SENT)
    assert sorted([*MESSAGES, HIDDEN.tag]) == [tag for tag in Tag if Tag.PLAN <= tag < Tag.KV]


@pytest.mark.parametrize(("tag", "value"), [(tag, value) for tag, some in SENT.items() for value in some])
def test_what_is_written_is_read(tag: Tag, value: Any) -> None:
    buffer = MESSAGES[tag].write(value)
    assert buffer.dtype == np.uint8 and buffer.ndim == 1
    found = MESSAGES[tag].read(np.frombuffer(buffer.tobytes(), np.uint8))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_stage_keep_every_bit(dtype: torch.dtype) -> None:
    x = torch.randn(6, 5).to(dtype).T
    assert torch.equal(HIDDEN.read(HIDDEN.write(x).copy()).view(dtype).view(5, 6), x)
