"""Instances that differ, in layout, size and speed, in one run."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.support import DONE, ROOT, USAGE, Samples, Starter, make_samples
from tests.helpers.unequal_cores import SLOWER, UNEQUAL

SLOTS = 4
HERE = {"PYTHONPATH": str(ROOT)}
LISTS = """
executors:
- {num_instances: 2, max_batch_size: 2}
- {tensor_parallel_size: 2, max_batch_size: 8}
"""


def shares(ended: dict[str, object]) -> list[int]:
    instances = ended["per_instance"]
    assert isinstance(instances, list)
    return [one["samples"] for one in instances]


def test_offline_a_slow_instance_answers_its_share(one: Starter, tmp_path: Path) -> None:
    """And does not answer last: the test takes about as long as it would if nobody ever waited."""
    n, ttft_s = 160, 0.2
    few = make_samples(tmp_path / "few.jsonl", [8] * n)
    ended = one.run(
        3, "--dataset_path", few.path, "--max_output_len", 1, "--max_batch_size", SLOTS,
        "--core_options", f"ttft_ms:{1000 * ttft_s:g}", "--test_mode", "AccuracyOnly",
        core=UNEQUAL, env=HERE,
    ).must(DONE)  # fmt: skip
    slow, quick = shares(ended.result)
    assert slow + quick == n
    # Its last requests are those that it had before the others were so far: at most what it takes at once.
    assert abs(slow - n / (SLOWER + 1)) <= SLOTS, (slow, quick)
    assert f"{slow} samples, {slow} tokens ({100 * slow / n:.0f} %)" in ended.flowing


def test_server_no_instance_is_overloaded(one: Starter, tmp_path: Path) -> None:
    """At a rate that only both together can serve, and half of which the slow one could not."""
    few = make_samples(tmp_path / "few.jsonl", [8] * 64)
    ttft_s = 0.1
    most = SLOTS / ttft_s * (1 + 1 / SLOWER)  # 53 requests/s
    ended = one.run(
        3, "--scenarios", "Server", "--server_target_qps", round(0.6 * most), "--min_duration", 4,
        "--min_query_count", 1, "--dataset_path", few.path, "--max_output_len", 1, "--max_batch_size", SLOTS,
        "--core_options", f"ttft_ms:{1000 * ttft_s:g}",
        core=UNEQUAL, env=HERE,
    ).must(DONE)  # fmt: skip
    slow, quick = shares(ended.result)
    assert 0.1 < slow / (slow + quick) < 0.45, (slow, quick)


def test_a_role_may_have_several_sections(both: Starter, samples: Samples, tmp_path: Path) -> None:
    file = tmp_path / "lists.yaml"
    file.write_text(LISTS)
    words = ["--disagg_config", file, "--dataset_path", samples.path, "--core_options", "ttft_ms:5"]
    ended = both.run(5, *words, "--test_mode", "AccuracyOnly", "--save_outputs").must(DONE)
    for line in ended.outputs():
        answer = line["output_tokens"]
        assert answer == samples.answer(line["index"], len(answer))
    ranks = [rank["instance"] for rank in ended.json("plan.json")["ranks"]]
    assert ranks == [None, 0, 1, 2, 2]
    instance_shares = "instances 0-1 17 % each (max_batch_size 2), instance 2 67 % (max_batch_size 8)"
    assert instance_shares in ended.flowing
    kept = ended.log_dir / "disagg.yaml"
    again = both.run(5, "--disagg_config", kept, *words[2:], log_dir=tmp_path / "again").must(DONE)
    assert (again.log_dir / "disagg.yaml").read_text() == kept.read_text()
    assert (
        instance_shares
        in both.mpillm("plan", "--disagg_config", file, "--core_type", "dummy").must(DONE).flowing
    )


def test_lists_are_for_one_run(one: Starter, tmp_path: Path) -> None:
    file = tmp_path / "lists.yaml"
    file.write_text("context_servers: [{}, {}]\ngeneration_servers: {}\n")
    error = one.mpillm("plan", "--disagg_config", file, "--core_type", "trtllm_disagg").must(USAGE).err
    assert "context_servers is a list, which is for the instances of one run" in error
