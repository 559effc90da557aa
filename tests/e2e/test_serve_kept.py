"""What a server has answered, and a test measured, is kept, also if rank 0 or mpirun is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.support import INSTANCE_LOST, Starter, wait_until


@pytest.mark.parametrize(("who", "cause"), [("rank 0", "killed"), ("mpirun", "ended by signal 9 (SIGKILL)")])
def test_a_test_leaves_what_its_instances_did(one: Starter, who: str, cause: str) -> None:
    """And a page, which the launcher writes."""
    endless = ("--core_type", "dummy", "--scenarios=Server", "--server_target_qps=50", "--min_duration=300")
    command = one.command([one.python, "-m", "mpillm", "mpirun", "-n", 2, "run", *endless, "--log_dir", "r"])
    result = one.folder / "r" / "result.json"

    def generated_tokens() -> int:
        per_instance = json.loads(result.read_text()).get("per_instance") if result.exists() else None
        return per_instance[0]["metrics"]["generated_tokens"] if per_instance else 0

    wait_until(generated_tokens, "what the instance has computed", 120)
    ranks = json.loads((one.folder / "r" / "ranks.json").read_text())
    rank_0 = next(entry["pid"] for entry in ranks if entry["rank"] == 0)
    os.kill(rank_0 if who == "rank 0" else parent_of(rank_0), signal.SIGKILL)
    command.end(120, tidy=False).must(INSTANCE_LOST)
    ended = json.loads(result.read_text())
    assert ended["status"] == "FAILED" and ended["samples"] > 0 and generated_tokens() > 0
    assert cause in (one.folder / "r" / "report.html").read_text()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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
    (instance,) = ended["per_instance"]
    assert instance["instance"] == 0 and instance["metrics"]["generated_tokens"] >= 60
    assert (one.folder / "s" / "telemetry.json").stat().st_size
    page = (one.folder / "s" / "report.html").read_text()
    assert (
        "tokens" in page
        and "killed" in page
        and ".json is missing" not in page
        and ".jsonl is missing" not in page
    )
