"""The instances' metrics during the test: for the progress lines, `result.json` and `timeline.jsonl`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mpillm.cores.base import Metrics
from mpillm.files import naming

LATELY_S = 10.0  # the window of a rate "now"
_MIN_WINDOW_S = 1.0  # in a shorter window, a rate depends mostly on when the metrics were read
_INTERVAL_S = 1.0  # between lines of an instance
_MAX_LINES_PER_S = 64  # of all instances; with more instances, each instance has fewer lines
_EARLY_S = 0.25  # metrics that are this much early are written: the next ones would be later still


class TotalMetrics(NamedTuple):
    """Figures of all instances together. Rates in tokens/s: the mean of the test so far, and the rate now."""

    generated: float
    generated_now: float
    prompt: float
    prompt_now: float
    running: int
    waiting: int
    kv_cache_usage: float | None  # of the instance with the fullest cache


def _figures(mean: float, peak: float, last: float) -> dict[str, float]:
    return {"mean": round(mean, 4), "peak": round(peak, 4), "last": round(last, 4)}


class _Gauge:
    """Mean, peak and last value."""

    def __init__(self) -> None:
        self._n, self._sum, self._peak, self._last = 0, 0.0, 0.0, 0.0

    def add(self, value: float) -> None:
        self._n += 1
        self._sum += value
        self._peak = max(self._peak, value)
        self._last = value

    def summary(self) -> dict[str, float] | None:
        """Return the figures; None if there was no value."""
        if self._n == 0:
            return None
        return _figures(self._sum / self._n, self._peak, self._last)


class _Track:
    """The metrics of one instance; constant size."""

    def __init__(self) -> None:
        # Seconds, prompt tokens, generated tokens. The oldest entry is at least `LATELY_S` old, or the start.
        self.recent = deque([(0.0, 0, 0)])
        self.metrics = Metrics(0, 0, 0, 0)
        self.written = 0.0
        self._gauges = {name: _Gauge() for name in ("running", "waiting", "kv_cache_usage")}
        self._peaks = [0.0, 0.0]

    @property
    def seconds(self) -> float:
        return self.recent[-1][0]

    def add(self, seconds: float, metrics: Metrics) -> None:
        self.metrics = metrics
        self.recent.append((seconds, metrics.prompt_tokens, metrics.generated_tokens))
        while len(self.recent) > 2 and self.recent[1][0] <= seconds - LATELY_S:
            self.recent.popleft()
        for name, gauge in self._gauges.items():
            if (value := getattr(metrics, name)) is not None:
                gauge.add(value)
        if seconds - self.recent[0][0] >= _MIN_WINDOW_S:
            self._peaks = [max(pair) for pair in zip(self._peaks, self.rates_now(), strict=True)]

    def end(self) -> None:
        self.metrics = self.metrics._replace(running=0, waiting=0, kv_cache_usage=None)
        self.recent = deque([self.recent[-1]])

    def rates(self) -> list[float]:
        """Return prompt tokens and generated tokens per second, over the test so far."""
        _, *counts = self.recent[-1]
        return [count / self.seconds if self.seconds > 0 else 0.0 for count in counts]

    def rates_now(self) -> list[float]:
        """Return `rates` over the last seconds."""
        (since, *before), (now, *counts) = self.recent[0], self.recent[-1]
        return [
            max(0, count - old) / (now - since) if now > since else 0.0
            for count, old in zip(counts, before, strict=True)
        ]

    def summary(self) -> dict[str, Any]:
        names = ("prompt_tokens", "generated_tokens")
        columns = zip(names, self.rates(), self._peaks, self.rates_now(), strict=True)
        rates = {
            f"{name}_per_second": _figures(mean, max(peak, mean), now) for name, mean, peak, now in columns
        }
        counts = {name: getattr(self.metrics, name) for name in names}
        return counts | rates | {name: gauge.summary() for name, gauge in self._gauges.items()}


class Timeline:
    """Collects the metrics of instances, which may come in any order; constant size."""

    def __init__(self, instances: Iterable[int], path: Path | None) -> None:
        """`path`: the file, created with its first line, so not for a core without metrics.

        None: no file at all.
        """
        self._instances = tuple(instances)
        self._interval_s = max(_INTERVAL_S, len(self._instances) / _MAX_LINES_PER_S)
        self._tracks: dict[int, _Track] = {}
        self._path = path
        self._file: TextIO | None = None
        self._closed = False

    def add(self, instance: int, seconds: float, metrics: Metrics) -> None:
        """Add the metrics of `instance` after `seconds` of the test.

        Raises OSError, with the file's name, if the disk is full.
        """
        track = self._tracks.setdefault(instance, _Track())
        if seconds <= track.seconds or self._closed:  # already added, or after the end of the test
            return
        track.add(seconds, metrics)
        if self._path is not None and seconds - track.written >= self._interval_s - _EARLY_S:
            track.written = seconds
            self._write(self._path, {"seconds": round(seconds, 3), "instance": instance} | _rounded(metrics))

    def lose(self, instance: int) -> None:
        """Record that the instance has exited: it has no requests now."""
        if (track := self._tracks.get(instance)) is not None:
            track.end()

    def total_metrics(self) -> TotalMetrics | None:
        """Return figures of all instances together; None before the first metrics."""
        if not self._tracks:
            return None
        tracks = list(self._tracks.values())
        seconds = max(track.seconds for track in tracks)  # a lost instance computes nothing after its end
        prompt, generated = (
            sum(counts) / seconds if seconds > 0 else 0.0
            for counts in zip(*(track.recent[-1][1:] for track in tracks), strict=True)
        )
        prompt_now, generated_now = (
            sum(rates) for rates in zip(*(track.rates_now() for track in tracks), strict=True)
        )
        every = [track.metrics for track in tracks]
        running, waiting = sum(one.running for one in every), sum(one.waiting for one in every)
        usage = max((one.kv_cache_usage for one in every if one.kv_cache_usage is not None), default=None)
        return TotalMetrics(generated, generated_now, prompt, prompt_now, running, waiting, usage)

    def summary(self, instance: int) -> dict[str, Any] | None:
        """Return for `result.json`: totals; mean, peak and last value of rates, requests and KV cache usage.

        None: the instance has sent no metrics.
        """
        track = self._tracks.get(instance)
        return track.summary() if track else None

    def per_instance(self) -> list[dict[str, Any]]:
        """Return each instance's metrics so far, for the `result.json` of a test that has not ended."""
        return [
            {"instance": instance, "metrics": summary}
            for instance in self._instances
            if (summary := self.summary(instance)) is not None
        ]

    def close(self) -> None:
        """Close the file, and ignore later metrics: the test is over. Raises OSError as `add`."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _write(self, path: Path, row: dict[str, Any]) -> None:
        with naming(path):
            if self._file is None:
                self._file = path.open("w", buffering=1, encoding="utf-8")
            self._file.write(json.dumps(row) + "\n")


def _rounded(metrics: Metrics) -> dict[str, Any]:
    usage = metrics.kv_cache_usage
    return metrics._asdict() | {"kv_cache_usage": None if usage is None else round(usage, 4)}
