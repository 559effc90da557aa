"""What a server has answered is kept, also if its rank 0 is killed."""

from __future__ import annotations

import json
import os
import re
import signal

from tests.helpers.support import INSTANCE_LOST, Starter, wait_until


def test_a_killed_rank_0_leaves_what_was_answered(one: Starter) -> None:
    words = ("mpirun", "-n", 2, "serve", "--core_type", "dummy", "--port", 0, "--log_dir", "s")
    command = one.command([one.python, "-m", "mpillm", *words], log_dir=one.folder / "s")
    found = wait_until(lambda: re.search(r"serving .* at (http://[^;\s]+)", command.out), "ready", 120)
    load = ("--num_prompts", 20, "--input_len", 4, "--output_len", 3, "--url", found[1])
    one.mpillm("bench", "endpoint", *load, "--log_dir", "load").must(0)
    result = one.folder / "s" / "result.json"
    wait_until(lambda: json.loads(result.read_text()).get("samples", 0) >= 20, "what was answered", 60)
    ranks = json.loads((one.folder / "s" / "ranks.json").read_text())
    os.kill(next(entry["pid"] for entry in ranks if entry["rank"] == 0), signal.SIGKILL)
    ended = command.end(120, tidy=False).must(INSTANCE_LOST).result
    assert ended["status"] == "FAILED" and ended["samples"] >= 20
    assert ended["tokens"] >= 60 and ended["ttft_ms"]["p50"] > 0
    assert (one.folder / "s" / "telemetry.json").stat().st_size
    page = (one.folder / "s" / "report.html").read_text()
    assert "tokens" in page and "killed" in page
