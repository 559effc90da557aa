"""Cores that are clients of scripted servers, and the rows that they give."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, ResponseFlag
from mpillm.cores.base import ClientConfig, CoreConfig, LLMCore
from mpillm.cores.registry import BackendRegistry
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.errors import RunError
from mpillm.options.options import parse_run
from tests.helpers.scripted_server import Reply, Request, ScriptedServer, good, plain
from tests.helpers.support import wait_until

FIRST, FINAL, CANCELLED = ResponseFlag.FIRST, ResponseFlag.FINAL, ResponseFlag.CANCELLED
LONG_S = 60.0
PROMPTS = [[1], [2, 3], [5, 6, 7], [20] * 50]


def requests(prompts: Sequence[Sequence[int]] = PROMPTS, max_output: int = 4, **fields: Any) -> Batch:
    """Return greedy requests with ids from 10 on."""
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"] = np.arange(10, 10 + len(prompts))
    rows["n_tokens"] = [len(prompt) for prompt in prompts]
    rows["max_output"] = max_output
    rows["top_p"] = 1
    rows["generation"] = NO_INSTANCE
    for name, value in fields.items():
        rows[name] = value
    return Batch(rows, np.array(list(itertools.chain(*prompts)), np.int32))


@contextmanager
def core_of(
    urls: str,
    *options: object,
    core_options: dict[str, Any] | None = None,
    serves: bool = False,
    **client: Any,
) -> Iterator[LLMCore]:
    """Yield a core with the values of a run's command line, and stop it in the end.

    `client`: fields of `ClientConfig`.
    """
    run = parse_run(["--core_type=trtllm_endpoint", f"--trtllm_server_urls={urls}", *map(str, options)])
    core_class = BackendRegistry.get(run.core_type)
    engine = EngineConfig.of({**run.values, "core_options": core_options})
    settings, place = core_class.settings(run), ClientConfig(**client)
    core_config = CoreConfig(run.core_type, engine, rank=2, serves=serves, client=place, settings=settings)
    core_config = replace(core_config, resets_prefix_cache=run.reset_prefix_cache)
    core_class.check(core_config)
    core = core_class(core_config)
    try:
        yield core
    finally:
        core.notify_stop()


@contextmanager
def started(server: ScriptedServer, *options: object, **fields: Any) -> Iterator[LLMCore]:
    """Yield a core that is ready to be given requests."""
    with core_of(server.address, *options, **fields) as core:
        core.load()
        core.run_health_check()
        core.start_test()
        yield core


class Rows:
    """Collects the responses of a core, row by row."""

    def __init__(self, core: LLMCore) -> None:
        self._core = core
        self.rows: list[tuple[int, int, list[int]]] = []  # id, flags, tokens

    def poll(self) -> Counter[int]:
        """Take what is there; return how often each request has ended."""
        if self._core.has_work() and (batch := self._core.poll_responses()) is not None:
            for one in batch.split():
                self.rows.append((int(one.rows["id"][0]), int(one.rows["flags"][0]), one.tokens.tolist()))
        return Counter(id_ for id_, flags, _ in self.rows if flags & FINAL)

    def until(self, n: int) -> list[tuple[int, int, list[int]]]:
        """Return all rows when `n` requests have ended, each of them once."""
        wait_until(lambda: len(self.poll()) >= n, f"{n} answers")
        assert set(self.poll().values()) == {1}
        return self.rows


def sleeping(core: LLMCore, n: int) -> Counter[int]:
    """Take rows until `n` requests have ended, as a rank that sleeps: look only when its core says so.

    Returns how often each has ended.
    """
    rang = threading.Event()
    core.wake = rang.set
    rows = Rows(core)
    while len(ended := rows.poll()) < n:
        quiet_s = core.quiet_s()
        if quiet_s > 0:
            assert rang.wait(min(quiet_s, LONG_S)) or quiet_s < LONG_S, f"not woken in {LONG_S:g} s"
            rang.clear()
    return ended


def failure(core: LLMCore) -> str:
    """Return the message that ends the run."""
    rows = Rows(core)
    with pytest.raises(RunError) as caught:
        wait_until(lambda: not rows.poll() and False, "a failure")
    (rank_failure,) = caught.value.failures
    assert rank_failure.rank == 2 and rank_failure.traceback == ""
    return rank_failure.cause


SERVER = "--scenarios=Server"


# --- servers that speak otherwise ---


def refuses(*names: str, status: str = "400 Bad Request") -> Callable[[Request], Reply]:
    """Return a server that knows no fields of these names."""

    def answer(request: Request) -> Reply:
        if wrong := [name for name in names if name in request.json]:
            return plain({"error": {"message": f"unknown field {wrong[0]}"}}, status)
        return good(request)

    return answer
