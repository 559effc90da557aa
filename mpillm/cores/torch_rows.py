"""Conversion of message rows to the engine's sequences, and of their tokens to rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import NO_INSTANCE, RESPONSE, Batch, RequestFlag, ResponseFlag

if TYPE_CHECKING:
    from mpillm.engine.schedule.sequence import Progress, Sequence

# Plain ints: operations on enum flags take longer than all other work for a row.
_FINAL, _ERROR, _CANCELLED = int(ResponseFlag.FINAL), int(ResponseFlag.ERROR), int(ResponseFlag.CANCELLED)
_TIMES, _LOGPROBS = int(ResponseFlag.TIMES), int(ResponseFlag.LOGPROBS)
_PROMPT_COUNTS = int(ResponseFlag.PROMPT_COUNTS)
_FLAGS = {  # by whether a row has the first and the last token
    (False, False): int(ResponseFlag.PARTIAL),
    (False, True): _FINAL,
    (True, False): int(ResponseFlag.FIRST),
    (True, True): int(ResponseFlag.FIRST) | _FINAL,
}


def new_sequence(row: NDArray[np.void], tokens: NDArray[np.int32]) -> Sequence:
    """Return a request's sequence: `row` of dtype REQUEST, and the prompt's tokens."""
    from mpillm.engine.schedule.sampling_params import SamplingParams
    from mpillm.engine.schedule.sequence import Sequence

    flags = int(row["flags"])
    return Sequence(
        id=int(row["id"]),
        prompt=tokens.tolist(),
        max_output=int(row["max_output"]),
        min_output=int(row["min_output"]),
        sampling=SamplingParams(
            float(row["temperature"]), int(row["top_k"]), float(row["top_p"]), int(row["seed"])
        ),
        hands_off=int(row["generation"]) != NO_INSTANCE,
        ignore_stop=bool(flags & RequestFlag.IGNORE_STOP),
        ignore_end=bool(flags & RequestFlag.IGNORE_END),
        stream=bool(flags & RequestFlag.STREAM),
        times=bool(flags & RequestFlag.TIMES),
        wants_reused=bool(flags & RequestFlag.PROMPT_COUNTS),
        wants_logprobs=int(row["logprobs"]),
        salt=row["salt"].tobytes() if row["salt"] else b"",
        added_at=time.perf_counter(),
    )


def responses(progress: Iterable[Progress], refused: Iterable[int]) -> Batch:
    """Return rows of dtype RESPONSE with their tokens, and record the sent tokens in the sequences."""
    rows: list[tuple[int, int, int]] = []
    tokens: list[int] = []
    for sequence, is_first, is_final in progress:
        if sequence.is_cancelled:
            rows.append((sequence.id, 0, _FINAL | _CANCELLED))
            continue
        if is_final:
            new_tokens = sequence.output
        elif is_first:
            new_tokens = sequence.output[:1]  # the second token may be there by now
        else:  # if the answer has ended, its last row sends the other tokens
            new_tokens = [] if sequence.is_done else sequence.output[sequence.n_passed_on :]
        if is_first and sequence.times:
            rows.append((sequence.id, 2, _TIMES))
            tokens += _times(sequence)
        if is_first and sequence.wants_reused:
            rows.append((sequence.id, 2, _PROMPT_COUNTS))
            tokens += len(sequence.prompt), sequence.n_reused
        if sequence.logprobs:
            numbers = [sequence.n_logprobs_sent, *itertools.chain(*sequence.logprobs)]
            rows.append((sequence.id, len(numbers), _LOGPROBS))
            tokens += numbers
            sequence.n_logprobs_sent += len(sequence.logprobs)
            sequence.logprobs.clear()
        if new_tokens:  # tokens of several steps are sent together
            sequence.n_passed_on = len(new_tokens) if is_first else sequence.n_passed_on + len(new_tokens)
            rows.append((sequence.id, len(new_tokens), _FLAGS[is_first, is_final]))
            tokens += new_tokens
    rows += [(id_, 0, _FINAL | _ERROR) for id_ in refused]
    return Batch(np.array(rows, RESPONSE), np.array(tokens, np.int32))


def _times(sequence: Sequence) -> list[int]:
    """Return the numbers of `ResponseFlag.TIMES`."""
    now = time.perf_counter()
    waited, computed = (
        min(int(1e6 * (now - at)), 2**31 - 1) for at in (sequence.added_at, sequence.started_at)
    )
    return [waited, computed]
