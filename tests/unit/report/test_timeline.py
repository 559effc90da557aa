"""What instances say of themselves in a test, as rates, in `result.json` and second by second."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mpillm.cores.base import Metrics
from mpillm.report.timeline import Timeline


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_comes_after_the_test_is_not_of_it(tmp_path: Path) -> None:
    """Instances report until they are stopped, which is after the file was closed."""
    timeline = Timeline([0, 1], tmp_path / "timeline.jsonl")
    timeline.add(0, 1.0, Metrics(1, 1, 1, 0, 0.0))
    assert timeline.per_instance() == [{"instance": 0, "metrics": timeline.summary(0)}], "1 has said nothing"
    timeline.close()
    timeline.add(0, 2.0, Metrics(2, 2, 0, 0, 0.0))
    assert len(lines(tmp_path / "timeline.jsonl")) == 1
    summary = timeline.summary(0)
    assert summary is not None and summary["prompt_tokens"] == 1


def test_rates_of_the_whole_test_and_of_its_last_seconds(tmp_path: Path) -> None:
    """One instance computes 100 prompt tokens a second for 20 s, then 10 tokens of answers; the other starts
    idle."""
    timeline = Timeline([0, 1], tmp_path / "timeline.jsonl")
    assert timeline.total_metrics() is None
    for half in range(1, 81):
        t = half / 2
        timeline.add(0, t, Metrics(int(100 * min(t, 20)), int(10 * max(0, t - 20)), 3, 80 - half, half / 160))
        timeline.add(1, t, Metrics(0, int(20 * max(0, t - 20)), 1, 0, 0.25))
    now = timeline.total_metrics()
    assert now is not None
    assert (now.prompt, now.prompt_now, now.generated, now.generated_now) == pytest.approx((50, 0, 15, 30))
    assert (now.running, now.waiting, now.kv_cache_usage) == (4, 0, 0.5)
    assert timeline.summary(0) == {
        "prompt_tokens": 2000,
        "generated_tokens": 200,
        "prompt_tokens_per_second": {"mean": 50.0, "peak": 100.0, "last": 0.0},
        "generated_tokens_per_second": {"mean": 5.0, "peak": 10.0, "last": 10.0},
        "running": {"mean": 3.0, "peak": 3, "last": 3},
        "waiting": {"mean": 39.5, "peak": 79, "last": 0},
        "kv_cache_usage": {"mean": 0.2531, "peak": 0.5, "last": 0.5},
    }
    assert timeline.summary(7) is None


def test_the_mean_of_the_test_includes_the_time_after_a_loss() -> None:
    """Two instances generate 100 tokens a second; one is lost after 10 of 100 s."""
    timeline = Timeline([0, 1], None)
    for second in range(1, 101):
        timeline.add(0, second, Metrics(0, 100 * second, 1, 0))
        if second <= 10:
            timeline.add(1, second, Metrics(0, 100 * second, 1, 0))
        if second == 10:
            timeline.lose(1)
    now = timeline.total_metrics()
    assert now is not None and (now.generated, now.generated_now) == pytest.approx((110, 100))


@pytest.mark.parametrize(("n_instances", "interval"), [(1, 1.0), (64, 1.0), (256, 4.0)])
def test_a_line_a_second_for_each_instance_and_fewer_of_many(
    tmp_path: Path, n_instances: int, interval: float
) -> None:
    timeline = Timeline(range(n_instances), tmp_path / "timeline.jsonl")
    for tick in range(1, 65):  # of a heartbeat that is a little late each time
        for instance in range(n_instances):
            for _ in range(3):  # asked more often than told
                timeline.add(instance, 0.501 * tick, Metrics(tick, 2 * tick, 1, 0))
    timeline.close()
    written = lines(tmp_path / "timeline.jsonl")
    assert {line["instance"] for line in written} == set(range(n_instances))
    of_first = [line for line in written if line["instance"] == 0]
    assert len(of_first) == int(32 / interval)
    assert of_first[0] == {
        "seconds": round(0.501 * 2 * interval, 3),
        "instance": 0,
        "prompt_tokens": 2 * interval,
        "generated_tokens": 4 * interval,
        "running": 1,
        "waiting": 0,
        "kv_cache_usage": None,
    }


def test_its_memory_does_not_grow_with_the_test(tmp_path: Path) -> None:
    timeline = Timeline([0], tmp_path / "timeline.jsonl")
    sizes = set()
    for tick in range(1, 2000):
        timeline.add(0, tick / 2, Metrics(tick, tick, 1, 0, 0.5))
        if tick >= 100:
            sizes.add(
                (
                    len(timeline._tracks[0].recent),
                    sum(map(sys.getsizeof, vars(timeline._tracks[0]).values())) // 1024,
                )
            )
    assert len(sizes) == 1


def test_cores_that_can_not_say_leave_no_file(tmp_path: Path) -> None:
    timeline = Timeline([0, 1], tmp_path / "timeline.jsonl")
    timeline.close()
    assert timeline.total_metrics() is None and timeline.summary(0) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_full_disk_names_the_file() -> None:
    with pytest.raises(OSError, match="/dev/full") as raised:
        Timeline([0], Path("/dev/full")).add(0, 1.0, Metrics(1, 1, 1, 1))
    assert raised.value.errno == errno.ENOSPC
