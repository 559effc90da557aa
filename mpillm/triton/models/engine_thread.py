"""A thread that drives one engine for the requests of all of Triton's threads, with in-flight batching.

    thread = EngineThread(core)
    response = EngineResponse(request, on_tokens)
    thread.submit([response])
    thread.cancel([response])
    thread.stop()

The engine's thread calls `on_tokens(response, tokens, is_final, error)` with the tokens since the last call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, RequestFlag, ResponseFlag
from mpillm.cores.base import LLMCore
from mpillm.triton.models.requests import NO_END, PromptRequest

if TYPE_CHECKING:
    from mpillm.engine.extras.lora import Adapter
    from mpillm.engine.extras.request_extras import RequestExtras

_log = logging.getLogger(__name__)
_IDLE_S = 0.5
_POLL_S = 0.0005
_END_S = 10.0
_REFUSED = (
    "the engine cannot compute the request: prompt and answer exceed its limits, or a token is not in its"
    " vocabulary; see the server's log"
)
OnTokens = Callable[["EngineResponse", Sequence[int], bool, str], None]


class EngineResponse:
    """Response to one prompt, with the tokens so far."""

    def __init__(self, request: PromptRequest, on_tokens: OnTokens) -> None:
        self.request = request
        self.on_tokens = on_tokens
        self.tokens: list[int] = []
        self.logprobs: list[float] = []  # per token, if requested
        self.is_done = False
        self.id = -1
        self.n_sent = 0
        self._n_looked = 0
        self._stop_words = {  # by their last token
            word[-1]: [w for w in request.stop_words if w[-1] == word[-1]] for word in request.stop_words
        }

    def truncate(self) -> bool:
        """Drop the tokens after the first end token or stop word; return whether there is one."""
        for i in range(self._n_looked, len(self.tokens)):
            n, token = i + 1, self.tokens[i]
            if n < self.request.min_output:
                continue
            words = self._stop_words.get(token, ())
            if token == self.request.end_id or any(tuple(self.tokens[n - len(w) : n]) == w for w in words):
                del self.tokens[n:]
                return True
        self._n_looked = len(self.tokens)
        return False

    def beams(self) -> list[tuple[list[int], list[float], float]]:
        """Return tokens, log probabilities and their sum of each beam, best first; [] without beam search."""
        extras = self.request.extras
        if extras is None or extras.beams is None:
            return []
        return [(beam.tokens, beam.logprobs, beam.sum) for beam in extras.beams.answers()]

    def send(self, is_final: bool, error: str = "") -> None:
        """Pass on the new tokens, if the request streams or this is the end."""
        self.is_done = self.is_done or is_final
        if not is_final and (not self.request.streaming or len(self.tokens) == self.n_sent):
            return
        new, self.n_sent = self.tokens[self.n_sent :], len(self.tokens)
        self.on_tokens(self, new, is_final, error)


@runtime_checkable
class TakesExtras(Protocol):
    """A core that accepts `RequestExtras`."""

    @property
    def takes_extras(self) -> bool:
        """Whether `enqueue_with_extras` works: not with pipeline parallelism. Known after `load`."""

    @property
    def takes_adapters(self) -> bool:
        """Whether `make_adapter` works: only on CPUs."""

    def enqueue_with_extras(self, requests: Batch, extras_by_id: Mapping[int, RequestExtras]) -> None:
        """Enqueue requests, with the extras of some by id. Results are stored in the extras."""

    def make_adapter(self, weights: NDArray[Any], config: NDArray[np.int32]) -> Adapter:
        """Create a LoRA adapter for `RequestExtras`. Raises ValueError if it does not fit the model."""


class EngineThread:
    """Drives a loaded core of an instance's root rank.

    `error`: why it has ended. Later requests fail with this error.
    """

    def __init__(
        self,
        core: LLMCore,
        every_s: float = _IDLE_S,
        call: Callable[[], object] | None = None,
        why_failed: Callable[[], str] | None = None,
    ) -> None:
        """`call`: runs on this thread every `every_s` seconds, between steps.

        `why_failed`: returns a better reason after an exception, or "".
        """
        self.core = core
        self.error = ""
        self._every_s, self._call, self._why_failed = every_s, call, why_failed
        # Protects the responses. Not held while the core computes, because `fail` must work then.
        self._lock = threading.Lock()
        self._mailbox: deque[EngineResponse] = deque()
        self._cancelled: deque[EngineResponse] = deque()
        self._open: dict[int, EngineResponse] = {}  # by id in the engine
        self._free = deque[int]()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpillm-engine", daemon=True)
        self._thread.start()

    def submit(self, responses: Iterable[EngineResponse]) -> None:
        """Queue requests; called from any thread."""
        responses = [*responses]
        with self._lock:
            if not self.error:
                self._mailbox.extend(responses)
                self._wake.set()
                return
        for response in responses:
            response.send(True, self.error)

    def cancel(self, responses: Iterable[EngineResponse]) -> None:
        """End responses with the tokens so far; ignore ended ones."""
        self._cancelled.extend(responses)
        self._wake.set()

    def fail(self, error: str) -> None:
        """Fail all open and later requests; called from any thread, also while the engine computes."""
        with self._lock:
            if self.error:
                return
            self.error = error
            waiting = [*self._open.values(), *self._mailbox]
            self._open.clear()
            self._mailbox.clear()
            self._wake.set()
        for response in waiting:
            if not response.is_done:
                response.send(True, error)

    def stop(self) -> None:
        """End the thread; open requests fail."""
        self.fail("the model is being unloaded")
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _log.warning("the engine's thread has not ended within %g s", _END_S)

    # --- on the engine's thread ---

    def _run(self) -> None:
        next_call = time.monotonic() + self._every_s
        while not self.error:
            try:
                self._accept()
                if self.core.has_work():
                    self._step()
                else:
                    # Messages of other ranks and results of GPUs do not set `_wake`, so poll.
                    self._wake.wait(min(self._every_s, _POLL_S if self.core.quiet_s() <= 0 else _IDLE_S))
                    self._wake.clear()
                if self._call is not None and time.monotonic() >= next_call:
                    self._call()
                    next_call = time.monotonic() + self._every_s
            except Exception as error:  # noqa: BLE001 - clients must receive it
                _log.exception("the engine has failed")
                why = self._why_failed() if self._why_failed is not None else ""
                self.fail(why or f"the engine has failed: {type(error).__name__}: {error}")

    def _accept(self) -> None:
        with self._lock:
            new = [self._mailbox.popleft() for _ in range(len(self._mailbox))]
            if new:
                batch = self._batch(new)
                extras_by_id = {one.id: one.request.extras for one in new if one.request.extras is not None}
                if extras_by_id:
                    assert isinstance(self.core, TakesExtras)  # requests with extras are rejected otherwise
                    self.core.enqueue_with_extras(batch, extras_by_id)
                else:
                    self.core.enqueue(batch)
            cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
            self._end([response for response in cancelled if not response.is_done])

    def _end(self, responses: list[EngineResponse]) -> None:
        """End responses that the engine still computes."""
        if responses:
            self.core.cancel([response.id for response in responses])
            for response in responses:
                response.send(True)

    def _batch(self, responses: list[EngineResponse]) -> Batch:
        rows = np.zeros(len(responses), REQUEST)
        for row, response in zip(rows, responses, strict=True):
            request = response.request
            response.id = self._free.popleft() if self._free else len(self._open)
            self._open[response.id] = response
            flags = RequestFlag.IGNORE_STOP
            if request.end_id is not None:
                flags |= RequestFlag.IGNORE_END
            if request.streaming or request.stop_words or request.end_id not in (None, NO_END):
                flags |= RequestFlag.STREAM
            row["id"], row["n_tokens"], row["flags"] = response.id, len(request.prompt), flags
            row["max_output"], row["min_output"] = request.max_output, request.min_output
            row["temperature"], row["top_k"] = request.temperature, request.top_k
            row["top_p"], row["seed"] = request.top_p, request.seed
            row["logprobs"] = request.log_probs and (request.extras is None or request.extras.beam_width == 1)
            row["generation"] = NO_INSTANCE
        return Batch(rows, np.array([token for a in responses for token in a.request.prompt], np.int32))

    def _step(self) -> None:
        batch = self.core.poll_responses()
        if batch is not None:
            with self._lock:
                if not self.error:
                    self._deliver(batch)

    def _deliver(self, batch: Batch) -> None:
        truncated = []
        for part in batch.split():
            (row,) = part.rows
            id_, flags = int(row["id"]), int(row["flags"])
            response, tokens = self._open[id_], part.tokens.tolist()
            if flags & ResponseFlag.LOGPROBS:  # an index, then a number per token
                response.logprobs += part.tokens[1:].view(np.float32).tolist()
                continue
            is_final = bool(flags & ResponseFlag.FINAL)
            if is_final:
                del self._open[id_]
                self._free.append(id_)
            if response.is_done:
                continue
            if flags & ResponseFlag.ERROR:
                extras = response.request.extras
                response.send(True, extras.error if extras is not None and extras.error else _REFUSED)
                continue
            response.tokens = tokens if is_final else response.tokens + tokens
            if response.truncate() and not is_final:
                truncated.append(response)
            else:
                response.send(is_final)
        self._end(truncated)
