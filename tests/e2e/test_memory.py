"""The memory of the harness and of the leader does not grow with completed requests."""

from __future__ import annotations

import json
import re
import statistics
import time
from itertools import pairwise
from pathlib import Path

from tests.helpers.support import DONE, ROOT, Starter, make_samples

N_SAMPLES = 200_000

# LoadGen's list of latencies takes 8 bytes of the harness for each sample that is done (its other records
# exist from the moment the query is issued). Nothing else grows.
LOADGEN_BYTES = {"harness": 8, "leader": 0, "instance": 0}

# What each request left behind would show between any two looks; what an allocator takes or gives back (a
# leader for which many answers waited: 4.8 MB) shows between two. So most looks decide. What grows in steps
# only does so in both halves of the test: each is held to 11 bytes for each of its 90,000 requests.
NOISE_BYTES = 4
STEPS_KB = 1024


def rss_kb(pid: int) -> int:
    """Return the resident memory of a process."""
    match = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def test_memory_does_not_grow_with_completed_requests(one: Starter, tmp_path: Path) -> None:
    samples = make_samples(tmp_path / "samples.jsonl", [100] * 500)
    options = ["--dataset_path", samples.path, "--min_query_count", N_SAMPLES, "--max_output_len", 16]
    # A core that keeps time answers each request by itself, which makes the test last long enough to be
    # looked at.
    options += ["--core_options", "ttft_ms:0.1", "--max_batch_size", 256]
    command = one.start(
        4,
        *options,
        "--control_ranks",
        2,
        core="tests.helpers.plugin_cores:Counting",
        env={"PYTHONPATH": str(ROOT)},
    )
    files = [tmp_path / "answered_2", tmp_path / "answered_3"]
    seen: list[tuple[int, list[int]]] = []
    end = time.monotonic() + 300
    while command.process.poll() is None:
        assert time.monotonic() < end
        done = sum(int(file.read_text()) for file in files if file.exists())
        if done >= (seen[-1][0] if seen else 0) + N_SAMPLES // 50:
            ranks = json.loads((command.log_dir / "ranks.json").read_text())
            try:
                seen.append((done, [rss_kb(entry["pid"]) for entry in ranks]))
            except FileNotFoundError:
                break  # it has just ended
        time.sleep(0.01)
    ended = command.end().must(DONE)
    assert ended.result["samples"] == N_SAMPLES
    roles = ["harness", "leader", "instance", "instance"]
    seen = [entry for entry in seen if entry[0] >= 0.1 * N_SAMPLES]  # all have begun by then
    assert len(seen) >= 10, f"looked at too seldom: {seen}"
    (first, before), (last, after) = seen[0], seen[-1]
    assert last - first >= 0.5 * N_SAMPLES, f"looked at too seldom: {seen}"
    for rank, role in enumerate(roles):
        what = f"rank {rank} ({role}); done and RSS in kB: {[(d, r[rank]) for d, r in seen]}"
        slope = statistics.median(1024 * (r[rank] - q[rank]) / (d - c) for (c, q), (d, r) in pairwise(seen))
        assert slope < LOADGEN_BYTES[role] + NOISE_BYTES, f"{slope:.1f} bytes for a request, {what}"
        middle = seen[len(seen) // 2][1]
        grown = min(middle[rank] - before[rank], after[rank] - middle[rank])
        assert grown < STEPS_KB + LOADGEN_BYTES[role] * (last - first) // 2048, f"{grown} kB, {what}"
