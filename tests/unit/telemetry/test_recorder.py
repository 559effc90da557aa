"""What a rank notes of its work: spans and samples in constant memory, whose sums stay true."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest

from mpillm.telemetry.rank_sampler import COLUMNS, RankSampler
from mpillm.telemetry.recorder import KINDS, Recorder, SpanTrack, SpanTracker
from mpillm.telemetry.series import Series


def test_a_full_lane_keeps_every_busy_second_and_step_in_order() -> None:
    lane = SpanTrack(64)
    for i in range(10_000):
        lane.add("context" if i % 3 else "decode", i, i + 0.5)
    found = lane.to_json(0.0)
    assert len(found["start"]) <= 64
    assert sum(found["n"]) == 10_000
    assert sum(found["busy_s"]) == pytest.approx(5_000, rel=1e-3)
    assert found["start"] == sorted(found["start"])
    assert (found["start"][0], found["end"][-1]) == (0.0, 9_999.5)
    assert {KINDS[kind] for kind in found["kind"]} == {"mixed"}


def test_fewer_spans_of_each_rank_where_there_are_many_ranks() -> None:
    recorder = Recorder()
    for i in range(1000):
        recorder.step(i, i + 0.25, 1, 0, 8)
    assert len(recorder.to_json(0.0, 1)["steps"]["start"]) == 1000
    few = recorder.to_json(0.0, 8192)["steps"]
    assert len(few["start"]) <= 64
    assert sum(few["busy_s"]) == pytest.approx(250, rel=1e-3)


def test_the_time_of_a_mixed_step_counts_by_tokens() -> None:
    recorder = Recorder()
    recorder.step(0.0, 1.0, 1, 10, 30)
    recorder.step(1.0, 3.0, 0, 10, 0)
    recorder.busy("context", 3.0, 4.0)
    recorder.handoff(0.5, 2.5)
    assert (recorder.context_s, recorder.decode_s, recorder.handoff_s) == (1.75, 2.25, 2.0)
    found = recorder.to_json(1.0, 1)
    assert [KINDS[kind] for kind in found["steps"]["kind"]] == ["mixed", "decode", "context"]
    assert found["steps"]["start"] == [-1.0, 0.0, 2.0]
    assert found["knows_steps"]


def test_a_spell_is_noted_when_it_ends() -> None:
    spans: list[tuple[float, float]] = []
    tracker = SpanTracker(lambda start, end: spans.append((start, end)))
    for now, holds in enumerate((False, True, True, False, False, True)):
        tracker.update(holds, now)
    assert spans == [(1, 3)]


def test_a_full_series_keeps_the_whole_time_and_its_last_rows() -> None:
    series = Series(("seconds", "value"), 100)
    for i in range(5000):
        series.add(i, 2 * i)
    found = series.to_json(10.0)
    assert len(found["seconds"]) <= 100
    assert found["value"] == [2 * (second + 10) for second in found["seconds"]]
    assert found["seconds"][0] < 100
    assert found["seconds"][-1] > 4800
    assert len(np.unique(np.diff(found["seconds"]))) == 1
    assert len(series.to_json(0.0, max_rows=10)["seconds"]) <= 10


def test_what_is_not_known_is_none_in_json() -> None:
    series = Series(("seconds", "watts"), 4)
    series.add(1.0, math.nan)
    assert json.loads(json.dumps(series.to_json(0.0), allow_nan=False)) == {"seconds": [1.0], "watts": [None]}
    assert Series(("seconds",), 4).to_json(0.0) == {"seconds": []}


def test_a_sample_has_this_process_s_time_and_memory() -> None:
    """Earlier tests leave threads that end and files that are closed between the two samples: few of each."""
    n, few = 40, 10
    sampler = RankSampler(Recorder())
    sampler.sample()
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(n)]
    for thread in threads:
        thread.start()
    with contextlib.ExitStack() as files:
        for _ in range(n):
            files.enter_context(Path("/proc/self/stat").open())
        sampler.sample()
    end.set()
    for thread in threads:
        thread.join()
    found = sampler.to_json(0.0, 1)
    assert tuple(found) == COLUMNS
    assert found["cpu_s"][1] >= found["cpu_s"][0] > 0
    assert 1 << 20 < found["rss_bytes"][0] < 1 << 40
    for column in ("threads", "open_files"):
        assert abs(found[column][1] - found[column][0] - n) < few, column
