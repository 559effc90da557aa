"""Open requests in the HTTP thread: the pending response of each id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import REQUEST, Batch, Refusal, ResponseFlag
from mpillm.roles.harness import LossCosts

_FIRST, _FINAL, _ERROR = int(ResponseFlag.FIRST), int(ResponseFlag.FINAL), int(ResponseFlag.ERROR)
_CANCELLED, _PARTIAL = int(ResponseFlag.CANCELLED), int(ResponseFlag.PARTIAL)
_CONTEXT_DONE, _CANCEL_DONE = int(ResponseFlag.CONTEXT_DONE), int(ResponseFlag.CANCEL_DONE)
_TIMES, _LOGPROBS = int(ResponseFlag.TIMES), int(ResponseFlag.LOGPROBS)
_PROMPT_COUNTS = int(ResponseFlag.PROMPT_COUNTS)
_LOST, _REFUSED = int(ResponseFlag.LOST), int(ResponseFlag.REFUSED)
_ALONE = _FIRST | _FINAL
_FIELDS = REQUEST.names or ()
# Bytes per token. Up to three arrays have the prompt for a while; an answer is a list of numbers.
_PROMPT_BYTES, _ANSWER_BYTES = 12, 40


class PendingResponse:
    """The answer to one prompt, as it arrives."""

    __slots__ = (
        "_early_tokens",
        "_final",
        "_first_comes",
        "_to_repeat",
        "_waiter",
        "cached",
        "cancelled",
        "ended",
        "failed",
        "first_at",
        "id",
        "last_at",
        "logprobs",
        "moved",
        "n_bytes",
        "n_prompt",
        "opened_at",
        "refusal",
        "released",
        "request",
        "times",
        "tokens",
        "wants_logprobs",
    )

    def __init__(self, id_: int, n_prompt: int, n_logprobs: int = 0) -> None:
        """`n_logprobs`: see `REQUEST`."""
        self.id = id_
        self.n_prompt = n_prompt
        self.tokens: list[int] = []
        self.ended = False
        self.failed = False  # the core could not answer
        self.refusal: Refusal | None = None  # the error of another server
        self.cancelled = False  # by `OpenRequests.give_up`
        self.opened_at = time.perf_counter()
        self.first_at = self.last_at = 0.0
        # If requested: `times`, the numbers of `ResponseFlag.TIMES`; `cached`, of PROMPT_COUNTS.
        # `moved`: the end of the KV cache transfer, and its µs.
        self.times: list[int] | None = None
        self.cached: int | None = None
        self.moved: tuple[float, int] | None = None
        self.wants_logprobs = n_logprobs
        self.logprobs: dict[int, list[int]] = {}  # by place in the answer; see `ResponseFlag.LOGPROBS`
        # The complete answer, if it arrived before the context instance's log probabilities.
        self._final: list[int] | None = None
        self.released = False  # no rank can send more of this answer
        # A generation instance's tokens that arrived before the context instance's first token.
        self._early_tokens: list[int] = []
        # If the request is computed again: tokens that the client has, and that must arrive again.
        self._to_repeat: list[int] = []
        self._first_comes = False  # the first token must arrive again
        self.request: Batch | None = None  # as sent
        self.n_bytes = 0  # upper bound of the request's memory
        self._waiter: asyncio.Future[None] | None = None

    @staticmethod
    def of(n_prompt: int, tokens: list[int]) -> PendingResponse:
        """Return an answer that is already complete: no rank computes it."""
        answer = PendingResponse(-1, n_prompt)
        answer.add(tokens, _ALONE)
        answer.released = True
        return answer

    async def changed(self) -> None:
        """Wait until there are more tokens, or the answer has ended. Only one task may wait."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def begin_again(self) -> None:
        """Start again after the loss of an instance: another one computes the answer from the beginning."""
        self._to_repeat = [*self.tokens]
        self._first_comes = bool(self.tokens)
        self._early_tokens = []
        self._final = None

    def _again(self, tokens: list[int], flags: int) -> tuple[list[int], int]:
        """Return the part of a repeated row that is new to the client.

        It is an error if the repeated tokens differ from the client's, because of sampling or rounding.
        """
        if flags & _FINAL:
            same = tokens[: len(self.tokens)] == self.tokens
            return (tokens, flags) if same else ([], _FINAL | _ERROR)
        if self._first_comes and not flags & _FIRST:  # it arrived before the first token
            self._early_tokens += tokens
            return [], _PARTIAL
        if flags & _FIRST:
            tokens, self._early_tokens, self._first_comes = tokens + self._early_tokens, [], False
        n = min(len(tokens), len(self._to_repeat))
        same = tokens[:n] == self._to_repeat[:n]
        self._to_repeat = self._to_repeat[n:]
        return (tokens[n:], _PARTIAL) if same else ([], _FINAL | _ERROR)

    def add(self, tokens: list[int], flags: int) -> None:
        """Add a row's tokens."""
        if flags & _FINAL and self._lacks_logprobs(tokens):
            self._final = tokens
            return
        if (self._to_repeat or self._first_comes) and not flags & (_ERROR | _CANCELLED):
            tokens, flags = self._again(tokens, flags)
            if not tokens and not flags & _FINAL:
                return
        if flags & _FINAL:
            self.ended, self.failed = True, bool(flags & _ERROR)
            if not flags & (_ERROR | _CANCELLED):
                self.tokens = tokens  # all tokens, including earlier ones
        elif flags & _FIRST:
            if not self.tokens:
                self.tokens = tokens + self._early_tokens
        elif self.tokens:
            self.tokens += tokens
        else:
            self._early_tokens += tokens
        if self.tokens:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add_logprobs(self, numbers: list[int]) -> None:
        """Add a row's log probabilities."""
        width = 2 * self.wants_logprobs - 1
        for i, at in enumerate(range(1, len(numbers), width)):
            self.logprobs[numbers[0] + i] = numbers[at : at + width]
        if self._final is not None and not self._lacks_logprobs(self._final):
            self.add(self._final, _FINAL)

    def _lacks_logprobs(self, tokens: list[int]) -> bool:
        return bool(self.wants_logprobs) and len(self.logprobs) < len(tokens)


class OpenRequests:
    """Assigns ids to requests, and reuses an id when no rank can send more rows with it."""

    def __init__(
        self, hands_over: bool, put: Callable[[Batch | int], None], cached: int | None = None
    ) -> None:
        """`hands_over`: the run has handoffs; `put`: adds to the mailbox.

        `cached`: prompt tokens in a KV cache, if the instances do not report them.
        """
        self._holders = 2 if hands_over else 1
        self._cached = cached
        self._put = put
        self._free: list[int] = []
        self._n_ids = 0
        # By id, the number of outstanding last rows: one from each of its instances, one for a cancellation.
        self._n_last_rows: dict[int, int] = {}
        self._answers: dict[int, PendingResponse] = {}  # by the same ids
        self.losses: dict[int, LossCosts] = {}  # by instance that was lost with open requests
        self._retried: dict[int, LossCosts] = {}  # by id
        self.n_bytes = 0  # upper bound of the memory of all requests
        self._cancelling: set[int] = set()  # ids with an outstanding CANCEL_DONE

    def __len__(self) -> int:
        """Return the number of ids in use, even by requests that have ended for their client."""
        return len(self._n_last_rows)

    @property
    def waiting(self) -> int:
        """Number of requests without a first token."""
        return sum(not answer.tokens and not answer.ended for answer in self._answers.values())

    @property
    def running(self) -> int:
        """Number of requests with a first token, but without the last one."""
        return sum(bool(answer.tokens) and not answer.ended for answer in self._answers.values())

    @staticmethod
    def bytes_of(n_prompt: int, max_output: int) -> int:
        """Return the approximate upper bound of a request's memory in this process."""
        return _PROMPT_BYTES * n_prompt + _ANSWER_BYTES * max_output

    def open(self, row: Mapping[str, float], prompt: Sequence[int] | NDArray[np.int32]) -> PendingResponse:
        """Send a request; `row`: the fields of REQUEST except `id` and `n_tokens`."""
        if self._free:
            id_ = self._free.pop()
        else:
            id_, self._n_ids = self._n_ids, self._n_ids + 1
        values = {**row, "id": id_, "n_tokens": len(prompt)}
        rows = np.array([tuple(values.get(name, 0) for name in _FIELDS)], REQUEST)
        answer = self._answers[id_] = PendingResponse(id_, len(prompt), int(row.get("logprobs", 0)))
        self._n_last_rows[id_] = self._holders
        answer.cached = self._cached
        answer.n_bytes = self.bytes_of(len(prompt), int(row["max_output"]))
        self.n_bytes += answer.n_bytes
        answer.request = Batch(rows, np.asarray(prompt, np.int32))
        self._put(answer.request)
        return answer

    def give_up(self, answer: PendingResponse) -> None:
        """Cancel a request, unless it has ended."""
        if not answer.ended and not answer.cancelled:
            answer.cancelled = True
            self._n_last_rows[answer.id] += 1
            self._cancelling.add(answer.id)
            self._put(answer.id)

    def give_up_all(self) -> None:
        for answer in [*self._answers.values()]:
            self.give_up(answer)

    def take(self, batch: Batch) -> None:
        """Process rows from the ranks."""
        rows, tokens, at = batch.rows, batch.tokens.tolist(), 0
        for id_, n, flags in zip(
            rows["id"].tolist(), rows["n_tokens"].tolist(), rows["flags"].tolist(), strict=True
        ):
            answer = self._answers[id_]
            if flags & _LOST:
                self._send_again(answer, tokens[at], flags)
                at += n
                continue
            if flags & (_FIRST | _FINAL | _PARTIAL) and not answer.ended:
                answer.add(tokens[at : at + n], flags)
            elif flags & _LOGPROBS:
                answer.add_logprobs(tokens[at : at + n])
            elif flags & _TIMES:
                answer.times = tokens[at : at + n]
            elif flags & _PROMPT_COUNTS:
                answer.cached = None if tokens[at + 1] < 0 else tokens[at + 1]
            elif flags & _REFUSED:
                answer.refusal = Refusal.of(tokens[at : at + n])
            elif flags & _CONTEXT_DONE and n:
                answer.moved = time.perf_counter(), tokens[at]
            at += n
            if flags & (_FINAL | _CONTEXT_DONE | _CANCEL_DONE):
                self._let_go(id_, flags)

    def _send_again(self, answer: PendingResponse, instance: int, flags: int) -> None:
        """Send an outstanding request of a lost instance again, unless it was cancelled."""
        id_ = answer.id
        if answer.ended or answer.cancelled or answer.request is None:
            answer.add([], _FINAL | _CANCELLED)
            if flags & _CANCEL_DONE:
                self._cancelling.discard(id_)
            self._n_last_rows[id_] = int(
                id_ in self._cancelling
            )  # the leader will still answer the cancellation
            self._free_if_done(id_)
            return
        loss = self.losses.setdefault(instance, LossCosts())
        loss.retried += 1
        loss.waited_s += time.perf_counter() - answer.opened_at
        self._retried[id_] = loss
        answer.begin_again()
        self._n_last_rows[id_] = self._holders
        self._put(answer.request)

    def _let_go(self, id_: int, flags: int) -> None:
        """Free the id after the last row.

        A request with a handoff ends twice, in either order: with FINAL and with CONTEXT_DONE.
        """
        # First and last token in one row: there was no handoff.
        self._n_last_rows[id_] -= (
            self._holders if flags & _ALONE == _ALONE else bool(flags & (_FINAL | _CONTEXT_DONE))
        )
        if flags & _CANCEL_DONE:
            self._n_last_rows[id_] -= 1
            self._cancelling.discard(id_)
        if self._retried and flags & _FINAL and (loss := self._retried.pop(id_, None)) is not None:
            loss.recovered = time.perf_counter()
        self._free_if_done(id_)

    def _free_if_done(self, id_: int) -> None:
        if not self._n_last_rows[id_]:
            self._retried.pop(id_, None)
            del self._n_last_rows[id_]
            answer = self._answers.pop(id_)
            answer.released = True
            self.n_bytes -= answer.n_bytes
            self._free.append(id_)
