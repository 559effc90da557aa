"""`trace.json`: a run in Chrome's trace event format, for Perfetto.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events (X) with
microseconds, metadata (M) that names processes and threads, counters (C), flows (s, f) from a request to its
answer. Each rank is a process, and its lanes are threads.
"""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.files import DATA_ERRORS, write_text
from mpillm.report.page.run_analysis import Facts, facts_of
from mpillm.report.request_log import read_requests
from mpillm.report.run_files import RunFiles

_PHASES, _STEPS, _HANDOFFS, _REQUESTS = 1, 2, 3, 100  # thread ids; requests have 100 and more
_MAX_REQUESTS = 2000
_SAMPLED = {"cpu_s": "CPU cores", "rss_bytes": "memory, MiB"}
_GPU = {"power_w": "GPU power, W", "sm_mhz": "GPU clock, MHz", "temperature_c": "GPU, °C", "load": "GPU load"}


def write_trace(run: RunFiles, path: Path) -> None:
    """Write the file. Raises OSError if the disk is full."""
    lines: list[str] = []
    with contextlib.suppress(*DATA_ERRORS):
        # The trace ends where a file is damaged. The HTML report has a note about it.
        lines.extend(json.dumps(event, separators=(",", ":")) for event in events(run))
    text = ",\n".join(lines)
    write_text(path, f'{{"displayTimeUnit":"ms","traceEvents":[\n{text}\n]}}\n')


def events(run: RunFiles) -> Iterator[dict[str, Any]]:
    """Yield the events of a run. Times count from the first event; in the files, 0 is the test's start."""
    facts, _ = facts_of(run)
    run = facts.run
    phases = [phase for noted in facts.noted.values() for phase in noted.get("phases") or []]
    zero = min([0.0, *(start for _, start, _ in phases)])
    names = {rank: one.name for one in facts.instances.values() for rank in one.ranks}
    roles = {one.get("rank"): " + ".join(one.get("roles") or []) for one in run.plan_ranks}
    kinds = run.telemetry.get("kinds") or []

    def at(seconds: float) -> float:
        return float(round((seconds - zero) * 1e6, 1))

    for rank, noted in sorted(facts.noted.items()):
        yield _named("process_name", rank, 0, f"rank {rank} {names.get(rank) or roles.get(rank, '')}".strip())
        for thread, name in ((_PHASES, "phases"), (_STEPS, "steps"), (_HANDOFFS, "handoffs")):
            yield _named("thread_name", rank, thread, name)
        for name, start, end in noted.get("phases") or []:
            yield _span(name, rank, _PHASES, at(start), at(end))
        for lane, thread in (("steps", _STEPS), ("handoffs", _HANDOFFS)):
            spans = noted.get(lane) or {}
            columns = [spans.get(name) or [] for name in ("start", "end", "kind", "n", "busy_s")]
            for start, end, kind, n, busy in zip(*columns, strict=False):
                name = kinds[kind] if kind < len(kinds) else "step"
                yield _span(name, rank, thread, at(start), at(end)) | {"args": {"n": n, "busy_s": busy}}
        yield from _counters(rank, noted.get("samples") or {}, at)
    yield from _instances(run, facts, at)
    yield from _requests(run, at)


def _counters(rank: int, samples: dict[str, Any], at: Any) -> Iterator[dict[str, Any]]:
    seconds = samples.get("seconds") or []
    cpu = samples.get("cpu_s") or []
    for (before, now), (spent_before, spent) in zip(pairwise(seconds), pairwise(cpu), strict=False):
        yield _counter(_SAMPLED["cpu_s"], rank, at(now), (spent - spent_before) / ((now - before) or 1))
    for now, rss in zip(seconds, samples.get("rss_bytes") or [], strict=False):
        yield _counter(_SAMPLED["rss_bytes"], rank, at(now), (rss or 0) / (1 << 20))
    gpu = samples.get("gpu") or {}
    for column, name in _GPU.items():
        for now, value in zip(gpu.get("seconds") or [], gpu.get(column) or [], strict=False):
            if value is not None:
                yield _counter(name, rank, at(now), value)


def _instances(run: RunFiles, facts: Facts, at: Any) -> Iterator[dict[str, Any]]:
    for row in run.timeline:
        if (one := facts.instances.get(row["instance"])) is not None:
            for column in ("running", "waiting", "kv_cache_usage"):
                if (value := row.get(column)) is not None:
                    yield _counter(column, one.ranks[0], at(row["seconds"]), value)


def _requests(run: RunFiles, at: Any) -> Iterator[dict[str, Any]]:
    """Yield requests on rank 0, each on a thread where no other request is open.

    A flow leads from a request's wait to its answer. With many requests, only every n-th is in the trace.
    """
    with contextlib.suppress(ConfigError):  # none was answered
        rows = read_requests(run.path)
        yield from _on_threads(rows[:: -(-len(rows) // _MAX_REQUESTS) or 1], at)


def _on_threads(rows: NDArray[np.void], at: Any) -> Iterator[dict[str, Any]]:
    """Yield the events of requests. `rows`: `request_log.RECORD`, in order of issue."""
    ends = rows["issued"] + rows["latency"]
    firsts = np.where(np.isnan(rows["ttft"]), ends, rows["issued"] + rows["ttft"])
    threads: list[tuple[float, int]] = []  # a heap: when each thread's last request ended
    for number, (issued, first, answered) in enumerate(
        zip(rows["issued"].tolist(), firsts.tolist(), ends.tolist(), strict=True)
    ):
        if threads and threads[0][0] <= issued:
            thread = heapq.heapreplace(threads, (answered, threads[0][1]))[1]
        else:
            thread = _REQUESTS + len(threads)
            heapq.heappush(threads, (answered, thread))
            yield _named("thread_name", 0, thread, f"requests {thread - _REQUESTS}")
        flow = {"cat": "request", "id": number, "pid": 0, "tid": thread, "name": "request"}
        yield _span("to first token", 0, thread, at(issued), at(first))
        yield flow | {"ph": "s", "ts": at(issued)}
        if answered > first:
            yield _span("answer", 0, thread, at(first), at(answered))
            yield flow | {"ph": "f", "bp": "e", "ts": at(first)}


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _span(name: str, rank: int, thread: int, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": start, "dur": round(end - start, 1)}


def _counter(name: str, rank: int, at: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": at, "args": {"value": round(value, 3)}}
