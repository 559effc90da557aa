"""One engine for the requests of all of Triton's threads, which join its batches while it runs.

    thread = EngineThread(core)
    thread.submit([Answer(asked, told)])
    thread.cancel([answer])
    thread.stop()

`told(answer, tokens, is_final, error)` is called on the engine's thread, with the tokens since the last call.
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
from mpillm.triton.models.requests import NO_END, Asked

if TYPE_CHECKING:
    from mpillm.engine.extras.lora import Adapter
    from mpillm.engine.extras.request_extras import RequestExtras

_log = logging.getLogger(__name__)
_IDLE_S = 0.5
_POLL_S = 0.0005
_END_S = 10.0
_REFUSED = (
    "the engine can't answer it: prompt and answer are longer than it can hold, or a token is not in its"
    " vocabulary; the server's log says which"
)
Told = Callable[["Answer", Sequence[int], bool, str], None]


class Answer:
    """The answer to one prompt, as far as it is known."""

    def __init__(self, asked: Asked, told: Told) -> None:
        self.asked = asked
        self.told = told
        self.tokens: list[int] = []
        self.logprobs: list[float] = []  # of each, if they are wanted
        self.is_done = False
        self.id = -1
        self.n_told = 0
        self._n_looked = 0
        self._words = {
            word[-1]: [w for w in asked.stop_words if w[-1] == word[-1]] for word in asked.stop_words
        }

    def cut(self) -> bool:
        """Drop what comes behind the first end token or stop word; whether there is one. Both are kept."""
        for i in range(self._n_looked, len(self.tokens)):
            n, token = i + 1, self.tokens[i]
            if n < self.asked.min_output:
                continue
            words = self._words.get(token, ())
            if token == self.asked.end_id or any(tuple(self.tokens[n - len(w) : n]) == w for w in words):
                del self.tokens[n:]
                return True
        self._n_looked = len(self.tokens)
        return False

    def beams(self) -> list[tuple[list[int], list[float], float]]:
        """Tokens, log probabilities and their sum of each beam, the best first; none without a search."""
        special = self.asked.special
        if special is None or special.beams is None:
            return []
        return [(beam.tokens, beam.logprobs, beam.sum) for beam in special.beams.answers()]

    def tell(self, is_final: bool, error: str = "") -> None:
        """Tell what is new, if whoever asks wants it now."""
        self.is_done = self.is_done or is_final
        if not is_final and (not self.asked.streaming or len(self.tokens) == self.n_told):
            return
        new, self.n_told = self.tokens[self.n_told :], len(self.tokens)
        self.told(self, new, is_final, error)


@runtime_checkable
class TakesSpecial(Protocol):
    """A core that can do what few requests ask for."""

    @property
    def takes_special(self) -> bool:
        """Whether `enqueue_special` works here, as nowhere with several stages; known after `load`."""

    @property
    def takes_adapters(self) -> bool:
        """Whether `make_adapter` does, too: so far on CPUs."""

    def enqueue_special(self, requests: Batch, specials: Mapping[int, RequestExtras]) -> None:
        """As `enqueue`, with what some of them ask for besides, by id; see there what comes back."""

    def make_adapter(self, weights: NDArray[Any], config: NDArray[np.int32]) -> Adapter:
        """Make a LoRA adapter for `RequestExtras.adapter`. Raises ValueError if it does not fit the model."""


class EngineThread:
    """Drives a loaded core, the leader of its instance.

    `error`: what ended it; requests are then answered with it.
    """

    def __init__(
        self,
        core: LLMCore,
        every_s: float = _IDLE_S,
        call: Callable[[], object] | None = None,
        why_failed: Callable[[], str] | None = None,
    ) -> None:
        """`call` is called there each `every_s` seconds, or later when a step takes longer.

        `why_failed` is asked, after an exception, for a better reason.
        """
        self.core = core
        self.error = ""
        self._every_s, self._call, self._why_failed = every_s, call, why_failed
        # Held while answers are told or change, not while the core computes: another rank may end then.
        self._lock = threading.Lock()
        self._mailbox: deque[Answer] = deque()
        self._given_up: deque[Answer] = deque()
        self._open: dict[int, Answer] = {}  # of the engine
        self._free = deque[int]()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpillm-engine", daemon=True)
        self._thread.start()

    def submit(self, answers: Iterable[Answer]) -> None:
        """Have them computed; called from any thread."""
        answers = [*answers]
        with self._lock:
            if not self.error:
                self._mailbox.extend(answers)
                self._wake.set()
                return
        for answer in answers:
            answer.tell(True, self.error)

    def cancel(self, answers: Iterable[Answer]) -> None:
        """End them with the tokens that they have; those that have ended are ignored."""
        self._given_up.extend(answers)
        self._wake.set()

    def fail(self, error: str) -> None:
        """Answer everything with this error from now on; called from any thread, whatever the engine does."""
        with self._lock:
            if self.error:
                return
            self.error = error
            waiting = [*self._open.values(), *self._mailbox]
            self._open.clear()
            self._mailbox.clear()
            self._wake.set()
        for answer in waiting:
            if not answer.is_done:
                answer.tell(True, error)

    def stop(self) -> None:
        """End the thread; what is open gets an error."""
        self.fail("the model is being unloaded")
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _log.warning("the engine's thread has not ended within %g s", _END_S)

    # --- on the engine's thread ---

    def _run(self) -> None:
        next_call = time.monotonic() + self._every_s
        while not self.error:
            try:
                self._take()
                if self.core.has_work():
                    self._step()
                else:
                    # What another rank sends, or a GPU has computed, wakes nobody.
                    self._wake.wait(min(self._every_s, _POLL_S if self.core.quiet_s() <= 0 else _IDLE_S))
                    self._wake.clear()
                if self._call is not None and time.monotonic() >= next_call:
                    self._call()
                    next_call = time.monotonic() + self._every_s
            except Exception as error:  # noqa: BLE001 - it must reach those who wait, not end in this thread
                _log.exception("the engine has failed")
                why = self._why_failed() if self._why_failed is not None else ""
                self.fail(why or f"the engine has failed: {type(error).__name__}: {error}")

    def _take(self) -> None:
        with self._lock:
            new = [self._mailbox.popleft() for _ in range(len(self._mailbox))]
            if new:
                batch = self._batch(new)
                specials = {one.id: one.asked.special for one in new if one.asked.special is not None}
                if specials:
                    assert isinstance(self.core, TakesSpecial)  # or it would have refused them
                    self.core.enqueue_special(batch, specials)
                else:
                    self.core.enqueue(batch)
            given_up = [self._given_up.popleft() for _ in range(len(self._given_up))]
            self._end([answer for answer in given_up if not answer.is_done])

    def _end(self, answers: list[Answer]) -> None:
        """End answers that the engine still computes."""
        if answers:
            self.core.cancel([answer.id for answer in answers])
            for answer in answers:
                answer.tell(True)

    def _batch(self, answers: list[Answer]) -> Batch:
        rows = np.zeros(len(answers), REQUEST)
        for row, answer in zip(rows, answers, strict=True):
            asked = answer.asked
            answer.id = self._free.popleft() if self._free else len(self._open)
            self._open[answer.id] = answer
            flags = RequestFlag.IGNORE_STOP
            if asked.end_id is not None:
                flags |= RequestFlag.IGNORE_END
            if asked.streaming or asked.stop_words or asked.end_id not in (None, NO_END):
                flags |= RequestFlag.STREAM
            row["id"], row["n_tokens"], row["flags"] = answer.id, len(asked.prompt), flags
            row["max_output"], row["min_output"] = asked.max_output, asked.min_output
            row["temperature"], row["top_k"] = asked.temperature, asked.top_k
            row["top_p"], row["seed"] = asked.top_p, asked.seed
            row["logprobs"] = asked.log_probs and (asked.special is None or asked.special.beam_width == 1)
            row["generation"] = NO_INSTANCE
        return Batch(rows, np.array([token for a in answers for token in a.asked.prompt], np.int32))

    def _step(self) -> None:
        batch = self.core.poll_responses()
        if batch is not None:
            with self._lock:
                if not self.error:
                    self._tell(batch)

    def _tell(self, batch: Batch) -> None:
        cut = []
        for part in batch.split():
            (row,) = part.rows
            id_, flags = int(row["id"]), int(row["flags"])
            answer, tokens = self._open[id_], part.tokens.tolist()
            if flags & ResponseFlag.LOGPROBS:  # a place, then a number for each token
                answer.logprobs += part.tokens[1:].view(np.float32).tolist()
                continue
            is_final = bool(flags & ResponseFlag.FINAL)
            if is_final:
                del self._open[id_]
                self._free.append(id_)
            if answer.is_done:
                continue
            if flags & ResponseFlag.ERROR:
                special = answer.asked.special
                answer.tell(True, special.error if special is not None and special.error else _REFUSED)
                continue
            answer.tokens = tokens if is_final else answer.tokens + tokens
            if answer.cut() and not is_final:
                cut.append(answer)
            else:
                answer.tell(is_final)
        self._end(cut)
