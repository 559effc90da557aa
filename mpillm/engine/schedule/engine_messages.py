"""The engine's own messages: for each tag its type, writer and reader.

The ranks of an instance exchange PLAN, TOKENS, MOVED and `groups.HIDDEN`. For KV cache transfers, ranks with
GPUs of two instances exchange NCCL_ID and NOTICE, or TARGETS and PUT. The caches themselves (`Tag.KV` and
above) are bytes as `KVCache.read` returns them. Both ends compute the number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Message
from mpillm.comms.tags import Tag
from mpillm.engine.schedule.host_blocks import BlockCopy
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.schedule.transfer import Kind, Transfer

if TYPE_CHECKING:  # the module starts MPI
    from mpillm.comms.transport import Buffer

# A step consists of int32: the head, a row for each span, blocks and window blocks of each span, a row for
# each transfer, blocks and window blocks of each transfer, a row for each copy, the tokens. Unless all
# requests are greedy, a row of `_SAMPLING` for each of `logits_rows` follows. The bytes of `Step.extras` come
# last. `Step.add` puts a span's last rows into `logits_rows`, and the first of these rows into `not_end`.
# Spans, transfers, copies, tokens, rows of `_SAMPLING`, `Step.logprobs`, whether there are `Step.extras`.
_HEAD = 7
# Slot, cached tokens, new tokens, blocks sent before, blocks sent now, window blocks likewise, rows in
# `logits_rows`, rows in `not_end`.
_SPAN = 9
_TRANSFER = 7  # kind, ticket, peer, slot, tokens, blocks, window blocks
_COPY = len(BlockCopy._fields)
_SAMPLING = np.dtype(
    [("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("seed", "<u4"), ("place", "<i4")]
)


class Notice(NamedTuple):
    """Report to the receiver of a buffer that its send was launched."""

    tag: int
    n_bytes: int


class PutTarget(NamedTuple):
    """Destination of a piece of a KV cache in the receiver's cache."""

    tag: int
    layer: int  # the first of the piece
    head: int
    n_tokens: int
    blocks: list[int]
    window_blocks: Sequence[int] = ()  # of layers with a window


def _write_step(step: Step) -> Buffer:
    not_end = set(step.not_end)
    numbers = [
        len(step.spans),
        len(step.transfers),
        len(step.copies),
        len(step.tokens),
        len(step.sampling or ()),
        step.logprobs,
        step.extras is not None,
    ]
    end = i = 0  # of the spans so far: number of rows, and of rows in `Step.logits_rows`
    for span in step.spans:
        end, first = end + span.n_new, i
        while i < len(step.logits_rows) and step.logits_rows[i] < end:
            i += 1
        n_not_end = len(not_end.intersection(range(first, i)))
        numbers += span.slot, span.n_cached, span.n_new, span.n_blocks_sent, len(span.blocks)
        numbers += span.n_window_blocks_sent, len(span.window_blocks), i - first, n_not_end
    for span in step.spans:
        numbers += span.blocks
        numbers += span.window_blocks
    for t in step.transfers:
        numbers += t.kind, t.ticket, t.peer, t.slot, t.n_tokens, len(t.blocks), len(t.window_blocks)
    for t in step.transfers:
        numbers += t.blocks
        numbers += t.window_blocks
    for copy in step.copies:
        numbers += copy
    numbers += step.tokens
    rows = [
        (p.temperature, p.top_k, p.top_p, p.seed, place)
        for p, place in zip(step.sampling or (), step.places, strict=True)
    ]
    parts = [_bytes(np.array(numbers, np.int32)), _bytes(np.array(rows, _SAMPLING))]
    if step.extras is not None:
        parts.append(np.frombuffer(bytes(step.extras), np.uint8))
    return np.concatenate(parts)


def _read_step(buffer: Buffer) -> Step:
    numbers = buffer.view(np.int32)
    n_spans, n_transfers, n_copies, n_tokens, n_sampled, n_logprobs, has_extras = numbers[:_HEAD].tolist()
    step, at, end = Step(logprobs=n_logprobs), _HEAD + n_spans * _SPAN, 0
    for *of_sequence, n_logits_rows, n_not_end in numbers[_HEAD:at].reshape(-1, _SPAN).tolist():
        slot, n_cached, n_new, n_sent, n_blocks, n_window_sent, n_window_blocks = of_sequence
        blocks = numbers[at : at + n_blocks + n_window_blocks].tolist()
        of_blocks, of_window = (n_sent, blocks[:n_blocks]), (n_window_sent, blocks[n_blocks:])
        step.spans.append(Span(slot, n_cached, n_new, *of_blocks, n_logits_rows > 1, *of_window))
        at += n_blocks + n_window_blocks
        end += n_new
        step.not_end += range(len(step.logits_rows), len(step.logits_rows) + n_not_end)
        step.logits_rows += range(end - n_logits_rows, end)
    heads = numbers[at : at + n_transfers * _TRANSFER]
    at += len(heads)
    for kind, ticket, peer, slot, length, n_blocks, n_window_blocks in heads.reshape(-1, _TRANSFER).tolist():
        blocks = numbers[at : at + n_blocks + n_window_blocks].tolist()
        of_both = blocks[:n_blocks], blocks[n_blocks:]
        step.transfers.append(Transfer(Kind(kind), ticket, peer, slot, length, *of_both))
        at += n_blocks + n_window_blocks
    copies = numbers[at : (at := at + n_copies * _COPY)].reshape(-1, _COPY)
    step.copies = [
        BlockCopy(block, host_block, bool(is_load)) for block, host_block, is_load in copies.tolist()
    ]
    step.tokens = numbers[at : at + n_tokens].tolist()
    at += n_tokens
    if n_sampled:
        end = at + n_sampled * _SAMPLING.itemsize // numbers.itemsize
        rows = numbers[at:end].view(_SAMPLING).tolist()
        step.sampling = [SamplingParams(*row[:4]) for row in rows]
        step.places, at = [row[4] for row in rows], end
    if has_extras:
        step.extras = numbers[at:].tobytes()
    return step


def _int32(tag: Tag) -> Message[list[int]]:
    return Message(
        tag, lambda values: _bytes(np.array(values, np.int32)), lambda buffer: buffer.view(np.int32).tolist()
    )


def _read_notices(buffer: Buffer) -> list[Notice]:
    return [Notice(*row) for row in buffer.view(np.int64).reshape(-1, 2).tolist()]


def _write_targets(targets: list[PutTarget]) -> Buffer:
    numbers: list[int] = []
    for target in targets:
        numbers += *target[:4], len(target.blocks), len(target.window_blocks)
        numbers += *target.blocks, *target.window_blocks
    return _bytes(np.array(numbers, np.int32))


def _read_targets(buffer: Buffer) -> list[PutTarget]:
    numbers, at, targets = buffer.view(np.int32).tolist(), 0, []
    while at < len(numbers):
        tag, layer, head, n_tokens, n_blocks, n_window_blocks = numbers[at : (at := at + 6)]
        blocks = numbers[at : (at := at + n_blocks)]
        window_blocks = tuple(numbers[at : (at := at + n_window_blocks)])
        targets.append(PutTarget(tag, layer, head, n_tokens, blocks, window_blocks))
    return targets


def _bytes(array: NDArray[Any]) -> Buffer:
    return array.view(np.uint8)


PLAN: Message[Step] = Message(Tag.PLAN, _write_step, _read_step)
TOKENS = _int32(Tag.TOKENS)  # of a step, as `Worker.run` returns them
MOVED = _int32(Tag.MOVED)  # tickets of transfers
NCCL_ID: Message[bytes] = Message(
    Tag.NCCL_ID, lambda unique: np.frombuffer(unique, np.uint8), lambda buffer: buffer.tobytes()
)
# The buffers that one launch sends over NCCL, in order.
NOTICE: Message[list[Notice]] = Message(
    Tag.NOTICE, lambda together: _bytes(np.array(together, np.int64).reshape(-1)), _read_notices
)
TARGETS: Message[list[PutTarget]] = Message(Tag.TARGETS, _write_targets, _read_targets)
PUT = _int32(Tag.PUT)  # tags of pieces that are in the receiver's blocks, in the order of their targets
