"""The engine's own messages: for each tag its type, writer and reader.

The ranks of an instance exchange PLAN, TOKENS, HIDDEN and MOVED. NCCL_ID and NOTICE go between the GPUs of
two instances that hand KV caches over. The caches themselves (`Tag.KV` and above) are bytes as `KVCache.read`
returns them; both ends know their sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.comms.messages import Message
from mpillm.comms.tags import Tag
from mpillm.engine.handoff.transfer import Kind, Transfer
from mpillm.engine.sampler import SamplingParams
from mpillm.engine.step import Span, Step

if TYPE_CHECKING:  # the module starts MPI
    from mpillm.comms.transport import Buffer

# A step as int32: the head, a row for each span, the spans' blocks, a row for each transfer, the transfers'
# blocks, the tokens; then a row of `_SAMPLING` for each wanted row, unless all are greedy. As `Step.of` makes
# them, a span's last rows are wanted, and the first of those are the ones that must not get an end token.
_HEAD = 5  # spans, transfers, tokens, whether there are rows of `_SAMPLING`, `Step.logprobs`
_SPAN = 7  # slot, cached, new, blocks told before, blocks told now, rows wanted, how many must not end
_TRANSFER = 6  # kind, ticket, peer, slot, tokens, blocks
_SAMPLING = np.dtype(
    [("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("seed", "<u4"), ("place", "<i4")]
)


class Notice(NamedTuple):
    """Tells the receiver of a buffer whose send was launched."""

    tag: int
    n_bytes: int


def _write_step(step: Step) -> Buffer:
    not_end = set(step.not_end)
    numbers = [
        len(step.spans),
        len(step.transfers),
        len(step.tokens),
        step.sampling is not None,
        step.logprobs,
    ]
    end = i = 0  # of the spans so far: rows, and those among `Step.wanted`
    for span in step.spans:
        end, first = end + span.n_new, i
        while i < len(step.wanted) and step.wanted[i] < end:
            i += 1
        n_not_end = len(not_end.intersection(range(first, i)))
        numbers += span.slot, span.n_cached, span.n_new, span.n_told, len(span.blocks), i - first, n_not_end
    for span in step.spans:
        numbers += span.blocks
    for t in step.transfers:
        numbers += t.kind, t.ticket, t.peer, t.slot, t.n_tokens, len(t.blocks)
    for t in step.transfers:
        numbers += t.blocks
    numbers += step.tokens
    rows = [
        (p.temperature, p.top_k, p.top_p, p.seed, place)
        for p, place in zip(step.sampling or (), step.places, strict=True)
    ]
    return np.concatenate([_bytes(np.array(numbers, np.int32)), _bytes(np.array(rows, _SAMPLING))])


def _read_step(buffer: Buffer) -> Step:
    numbers = buffer.view(np.int32)
    n_spans, n_transfers, n_tokens, is_sampled, n_logprobs = numbers[:_HEAD].tolist()
    step, at, end = Step(logprobs=n_logprobs), _HEAD + n_spans * _SPAN, 0
    for row in numbers[_HEAD:at].reshape(-1, _SPAN).tolist():
        slot, n_cached, n_new, n_told, n_blocks, n_wanted, n_not_end = row
        blocks = numbers[at : at + n_blocks].tolist()
        step.spans.append(Span(slot, n_cached, n_new, n_told, blocks, is_few=n_wanted > 1))
        at += n_blocks
        end += n_new
        step.not_end += range(len(step.wanted), len(step.wanted) + n_not_end)
        step.wanted += range(end - n_wanted, end)
    heads = numbers[at : at + n_transfers * _TRANSFER]
    at += len(heads)
    for kind, ticket, peer, slot, length, n_blocks in heads.reshape(-1, _TRANSFER).tolist():
        blocks = numbers[at : at + n_blocks].tolist()
        step.transfers.append(Transfer(Kind(kind), ticket, peer, slot, length, blocks))
        at += n_blocks
    step.tokens = numbers[at : at + n_tokens].tolist()
    if is_sampled:
        rows = numbers[at + n_tokens :].view(_SAMPLING).tolist()
        step.sampling = [SamplingParams(*row[:4]) for row in rows]
        step.places = [row[4] for row in rows]
    return step


def _int32(tag: Tag) -> Message[list[int]]:
    return Message(
        tag, lambda values: _bytes(np.array(values, np.int32)), lambda buffer: buffer.view(np.int32).tolist()
    )


def _read_notices(buffer: Buffer) -> list[Notice]:
    return [Notice(*row) for row in buffer.view(np.int64).reshape(-1, 2).tolist()]


def _bytes(array: NDArray[Any]) -> Buffer:
    return array.view(np.uint8)


PLAN: Message[Step] = Message(Tag.PLAN, _write_step, _read_step)
TOKENS = _int32(Tag.TOKENS)  # of a step, what `Worker.run` returns
# A step's rows in the weights' dtype. They are read as uint8 [bytes]: the receiver knows their shape from the
# step.
HIDDEN: Message[Tensor] = Message(
    Tag.HIDDEN, lambda x: x.contiguous().view(torch.uint8).numpy().reshape(-1), torch.from_numpy
)
MOVED = _int32(Tag.MOVED)  # tickets of transfers
NCCL_ID: Message[bytes] = Message(
    Tag.NCCL_ID, lambda unique: np.frombuffer(unique, np.uint8), lambda buffer: buffer.tobytes()
)
# What one launch sends over NCCL, in order.
NOTICE: Message[list[Notice]] = Message(
    Tag.NOTICE, lambda together: _bytes(np.array(together, np.int64).reshape(-1)), _read_notices
)
