"""`LLMCore` as in NVIDIA's harness: a backend that accepts requests, and a thread that fetches its responses.

A subclass implements `_enqueue_impl`, `_poll_responses_impl`, `run_health_check`,
`get_num_cores_for_workload` and `get_config_for_core`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mpillm.llmlib.config import HarnessConfig, with_generation
from mpillm.llmlib.utils import LLMServerProgressDisplay
from mpillm.nvidia import backends

_POLL = datetime.timedelta(milliseconds=1)
_WAIT_S = 1.0  # timeout of one wait for a condition
_WARM_UP_TOKENS = 100  # per prompt

CompleteCallback = Callable[..., object]
"""Called with request_id, output_tokens and is_first_token, by name, in the core's thread."""


@dataclass
class LLMRequest:
    """A request."""

    request_id: int
    input_tokens: list[int]
    stop_tokens: list[int] | None = None  # the stop word that ends the answer, in addition to end tokens


@dataclass
class LLMResponse:
    """A response, or with streaming a piece of one."""

    request_id: int  # from `_enqueue_impl`
    # by beam, the best first; with streaming only new tokens
    output_tokens: list[list[int]] | None
    is_final_token: bool | None
    error: Exception | None = None  # the core retries, and another response will follow


def warm_up_requests(n: int) -> list[LLMRequest]:
    """Return requests for a warm-up: random small token ids, always the same."""
    prompts = np.random.default_rng(0).integers(1, 100, (n, _WARM_UP_TOKENS)).tolist()
    return [LLMRequest(i, prompt) for i, prompt in enumerate(prompts)]


@dataclass(slots=True)
class _Open:
    """An open request."""

    request_id: int
    since: float
    tokens: list[int] = field(default_factory=list)  # with streaming: the tokens so far
    first_s: float | None = None  # time to the first token


class LLMCore(ABC):
    """A backend: an engine in this process, or the client of a server."""

    # the adapter for ranks, for `BackendRegistry`
    rank_core: ClassVar[str] = "mpillm.llmlib.rank_core:rank_core"
    CONFIG_T: ClassVar[type[backends.HarnessConfig]] = HarnessConfig
    _end_s = 5.0  # timeout for the end of the response thread

    def __init__(
        self,
        name: str,
        complete_callback: CompleteCallback,
        harness_config: backends.HarnessConfig,
        progress_display: LLMServerProgressDisplay,
        verbose: bool = False,
        verbose_nvtx: bool = False,
    ) -> None:
        """Arguments come from `get_config_for_core`; `verbose_nvtx` is for subclasses with NVTX ranges."""
        self.name = name
        self.complete_callback = complete_callback
        self.harness_config = with_generation(harness_config)
        self.progress_display = progress_display
        self.verbose = verbose
        self.verbose_nvtx = verbose_nvtx
        self.logger = logging.getLogger(f"mpillm.{name}")
        if verbose:
            self.logger.setLevel(logging.DEBUG)
        self.processed_count = 0
        self.in_warmup_mode = False
        self.stop_work = threading.Event()
        self.error: BaseException | None = None  # the error that ended the response thread
        self.response_thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}  # by the backend's id
        self._changed = threading.Condition()  # guards the next two, `stop_work` and `error`
        self._n_undelivered = 0  # requests without a delivered answer
        self._delivered_at = 0.0
        self.n_assigned = 0  # requests that a server has assigned and not enqueued yet

    # --- a subclass implements these ---

    @abstractmethod
    def _enqueue_impl(self, queries: list[LLMRequest]) -> list[int]:
        """Submit requests to the backend, and return its ids in order."""

    @abstractmethod
    def _poll_responses_impl(self, timeout: datetime.timedelta) -> Iterable[LLMResponse]:
        """Return the available responses within `timeout`."""

    @abstractmethod
    def run_health_check(self) -> None:
        """Raise if the backend is not ready. The warm-up manager repeats the check until its timeout."""

    @classmethod
    @abstractmethod
    def get_num_cores_for_workload(cls, **kwargs: Any) -> int:
        """Return the number of cores on all ranks together. `kwargs`: the backend's arguments."""

    @classmethod
    @abstractmethod
    def get_config_for_core(
        cls,
        core_index: int,
        complete_callback: CompleteCallback,
        progress_display: LLMServerProgressDisplay,
        verbose: bool,
        verbose_nvtx: bool,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `__init__` for core `core_index`. `kwargs`: the backend's arguments."""

    def warm_up(self, warm_up_iters: int | None = None) -> None:
        """Answer requests without a callback. Optional."""
        self.warm_up_with(
            warm_up_requests(self.get_num_warmup_iters() if warm_up_iters is None else warm_up_iters)
        )

    def get_num_warmup_iters(self) -> int:
        """Return the number of warm-up requests. Optional."""
        return 10

    def _cleanup_resources(self) -> None:  # noqa: B027 - optional
        """Shut the backend down. Called once, in the response thread, after the last response. Optional."""

    def flush(self) -> None:
        """Wait until every answer is delivered. Optional.

        Raises RuntimeError if the core has failed, TimeoutError if it is silent for --stall_timeout.
        """
        stall_s, began = self.harness_config.stall_timeout, time.monotonic()
        with self._changed:
            while self._n_undelivered and self.error is None:
                if (silent := time.monotonic() - max(began, self._delivered_at)) > stall_s:
                    raise TimeoutError(
                        f"core {self.name}: {self._n_undelivered} requests open, and silent for"
                        f" {silent:.0f} s (--stall_timeout {stall_s:g})"
                    )
                self._changed.wait(_WAIT_S)
        self.check()

    def notify_stop(self) -> None:
        """Accept no more requests; end the response thread after the open ones. Does not wait."""
        with self._changed:
            self.stop_work.set()
            self._changed.notify_all()

    # --- what a server calls ---

    @contextlib.contextmanager
    def warmup_mode(self) -> Iterator[None]:
        """Disable the callback in the block."""
        self.in_warmup_mode = True
        try:
            yield
        finally:
            self.in_warmup_mode = False

    def warm_up_with(self, queries: list[LLMRequest]) -> None:
        """Answer `queries` without a callback."""
        with self.warmup_mode():
            self.enqueue(queries)
            self.flush()

    def enqueue(self, queries: list[LLMRequest]) -> int:
        """Submit requests and return their number. Raises RuntimeError if the core has failed or stopped."""
        self.check()
        if self.stop_work.is_set():
            raise RuntimeError(f"core {self.name} was stopped and takes no more requests")
        self._initialize_response_thread()
        with self._lock:  # an immediate answer must wait until the request is in `_open`
            now = time.monotonic()
            for id_, query in zip(self._enqueue_impl(queries), queries, strict=True):
                self._open[id_] = _Open(query.request_id, now)
        with self._changed:
            self._n_undelivered += len(queries)
            self._changed.notify_all()
        return len(queries)

    def get_num_pending_samples(self) -> int:
        """Return the number of open requests."""
        return len(self._open)

    def check(self) -> None:
        """Raise RuntimeError if the response thread has failed."""
        if self.error is not None:
            raise RuntimeError(
                f"core {self.name} failed: {type(self.error).__name__}: {self.error}"
            ) from self.error

    def end(self, *, abandon: bool = False) -> None:
        """Call `notify_stop`, and wait for the response thread. `abandon`: drop open requests."""
        self.notify_stop()
        if abandon:
            with self._lock:
                self._open.clear()
        if self.response_thread is None:
            self._cleanup_resources()
        elif self.response_thread is not threading.current_thread():
            self.response_thread.join(self._end_s)
            if self.response_thread.is_alive():
                self.logger.warning(
                    "core %s: _poll_responses_impl has not returned for %g s; its thread is left",
                    self.name,
                    self._end_s,
                )

    # --- the response thread ---

    def _initialize_response_thread(self) -> None:
        """Start the response thread once: at the end of a subclass's `__init__`, or for the first request."""
        if self.response_thread is None:
            self.response_thread = threading.Thread(
                target=self._poll_responses, name=f"mpillm-{self.name}", daemon=True
            )
            self.response_thread.start()

    def _poll_responses(self) -> None:
        try:
            while self._has_work():
                began = time.monotonic()
                if not self._take(self._poll_responses_impl(_POLL)):
                    # if `_poll_responses_impl` has not waited
                    time.sleep(max(0.0, _POLL.total_seconds() - (time.monotonic() - began)))
        except BaseException as error:  # noqa: BLE001 - `check` raises it
            self.error = error
        finally:
            try:
                self._cleanup_resources()
            finally:
                with self._changed:
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        """Wait until requests are open; return False if the core has stopped and none is open."""
        with self._changed:
            while not self._open and not self.stop_work.is_set():
                self._changed.wait(_WAIT_S)
        return bool(self._open)

    def _take(self, responses: Iterable[LLMResponse]) -> bool:
        """Deliver responses, and return whether there are any."""
        some, ended, tokens = False, 0, 0
        ttfts: list[float] = []
        tpots: list[float] = []
        for response in responses:
            some = True
            if response.error is not None:
                self.logger.warning(
                    "request %s: %s; the core tries again", response.request_id, response.error
                )
                continue
            with self._lock:
                request = self._open.get(response.request_id)
                if request is not None and response.is_final_token:
                    del self._open[
                        response.request_id
                    ]  # before the callback, after which the id may be reused
            if request is None:
                if self.stop_work.is_set():
                    continue  # a dropped request
                raise RuntimeError(f"a response to request {response.request_id}, which is not open")
            elapsed = time.monotonic() - request.since
            request.tokens += (response.output_tokens or [[]])[0]  # of the best beam
            is_first = self._streaming and request.first_s is None and bool(request.tokens)
            if is_first:
                request.first_s = elapsed
                ttfts.append(elapsed)
            if response.is_final_token:
                ended += 1
                tokens += len(request.tokens)
                self._check_length(request)
                if request.first_s is not None and len(request.tokens) > 1:
                    tpots.append(1000 * (elapsed - request.first_s) / (len(request.tokens) - 1))
                self._call_back(request, is_first=False)
            elif is_first:
                self._call_back(request, is_first=True)
            elif not self._streaming:
                raise RuntimeError(
                    f"a response to request {response.request_id} is not final, and this run is not streaming"
                )
        if ended and not self.in_warmup_mode:
            self.processed_count += ended
            self._update_progress_display(ended, tokens, ttfts, tpots)
        if ended:
            with self._changed:
                self._n_undelivered -= ended
                self._delivered_at = time.monotonic()
                self._changed.notify_all()
        return some

    @property
    def _streaming(self) -> bool:
        return self.harness_config.gen_config is not None and self.harness_config.gen_config.streaming

    def _call_back(self, request: _Open, *, is_first: bool) -> None:
        if not self.in_warmup_mode:
            self.complete_callback(
                request_id=request.request_id, output_tokens=list(request.tokens), is_first_token=is_first
            )

    def _check_length(self, request: _Open) -> None:
        min_output_len = (
            self.harness_config.gen_config.min_output_len if self.harness_config.gen_config else 1
        )
        if len(request.tokens) < min_output_len:
            raise RuntimeError(
                f"request {request.request_id}: an answer of {len(request.tokens)} tokens;"
                f" min_output_len is {min_output_len}"
            )

    def _update_progress_display(
        self, num_completed: int, num_toks: int, ttfts: list[float], tpots: list[float]
    ) -> None:
        """Update the display after final responses. A subclass may add its own units."""
        units: dict[str, float | Iterable[float]] = {"tokens/s": num_toks}
        if ttfts or tpots:
            units |= {"TTFT(s)": ttfts, "TPOT(ms)": tpots}
        self.progress_display.update(completed=num_completed, additional_unit_updates=units)
