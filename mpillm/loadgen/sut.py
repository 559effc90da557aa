"""The system under test: LoadGen in a thread of its own, connected to the event loop by a queue."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlperf_loadgen as lg
import numpy as np
from numpy.typing import NDArray

from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import Refusal
from mpillm.loadgen.settings import log_settings

# LoadGen's callback waits for the GIL while the event loop runs: Python's default of 5 ms would dominate a
# latency.
_SWITCH_INTERVAL_S = 0.0002


class Query(NamedTuple):
    ids: NDArray[np.uint64]  # LoadGen's
    indices: NDArray[np.int64]  # in the data set
    issued: float  # time.perf_counter()
    prompts: Sequence[NDArray[np.int32] | None] | None = None  # in place of the data set's, except where None
    sessions: NDArray[np.uint32] | None = None  # the conversations
    cancel_after: NDArray[np.float64] | None = None  # seconds after sending; NaN: never

    def split(self, n: int) -> tuple[Query, Query]:
        """Return the first `n` requests, and the others."""
        each: dict[str, Any] = self._asdict()
        arrays = {name: each[name] for name in each if name != "issued" and each[name] is not None}
        first, other = (
            self._replace(**{name: values[part] for name, values in arrays.items()})
            for part in (slice(n), slice(n, None))
        )
        return first, other


class LoadGenTest:
    """One test. `issued` fills while it runs; any thread may report completions."""

    def __init__(
        self, settings: Any, n_samples: int, directory: Path, audit_conf: str, loop: EventLoop
    ) -> None:
        """`loop`: the main thread's event loop, woken by changes of `issued` or `finished`."""
        self.issued: deque[Query] = deque()
        self.request_flags = 0
        self.finished = False
        self.error: BaseException | None = None
        self.use_token_latencies = (
            bool(settings.use_token_latencies) and settings.scenario != lg.TestScenario.Offline
        )
        self._loop = loop
        self._arguments = (settings, log_settings(directory), audit_conf)
        # The fast variant passes plain numbers instead of an object for each sample.
        self._sut = lg.ConstructFastSUT(self._issue, lambda: None)
        # The data set stays in memory for the whole run: there is nothing to load or unload.
        self._qsl = lg.ConstructQSL(n_samples, n_samples, lambda indices: None, lambda indices: None)
        self._thread = threading.Thread(target=self._run, name="mpillm-loadgen", daemon=True)

    def start(self) -> None:
        """Start the test. `finished` becomes True at its end."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._thread.start()

    def first_tokens(self, ids: list[int], tokens: NDArray[np.int32], starts: list[int]) -> None:
        """Report the first tokens of samples to LoadGen: ``tokens[start]`` for each start."""
        lg.FirstTokenComplete(sample_responses(ids, tokens, starts, [1] * len(ids)))

    def complete(
        self, ids: list[int], tokens: NDArray[np.int32], starts: list[int], lengths: list[int], is_error: bool
    ) -> None:
        """Report responses to LoadGen, which copies the tokens before this returns.

        A response is ``tokens[start : start + length]``. LoadGen does not distinguish errors.
        """
        lg.QuerySamplesComplete(sample_responses(ids, tokens, starts, lengths))

    def message(self, id_: int, text: bytes) -> None:
        """Do nothing: LoadGen receives tokens."""

    def refused(self, id_: int, refusal: Refusal) -> None:
        """Do nothing: LoadGen does not distinguish errors."""

    def _issue(self, ids: list[int], indices: list[int]) -> None:
        self.issued.append(Query(np.array(ids, np.uint64), np.array(indices, np.int64), time.perf_counter()))
        # The main thread handles several samples, because LoadGen's thread must issue further queries.
        (self._loop.run_inline_or_wake if len(ids) == 1 else self._loop.wake)()

    def _run(self) -> None:
        settings, logs, audit = self._arguments
        try:
            lg.StartTestWithLogSettings(self._sut, self._qsl, settings, logs, audit)
            lg.DestroyQSL(self._qsl)
            lg.DestroyFastSUT(self._sut)
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
            self.error = error
        self.finished = True
        self._loop.wake()


def sample_responses(
    ids: list[int], tokens: NDArray[np.int32], starts: list[int], lengths: list[int]
) -> list[Any]:
    """Return LoadGen's responses for samples whose answers are ``tokens[start : start + length]``.

    `tokens` must outlive the responses.
    """
    first, make = tokens.__array_interface__["data"][0], lg.QuerySampleResponse
    return [
        make(id_, first + 4 * start, 4 * length, length)
        for id_, start, length in zip(ids, starts, lengths, strict=True)
    ]
