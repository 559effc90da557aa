"""The page of a run: what it says, and that broken files cost only what they would have told."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpillm.cli import main
from mpillm.report.numbers import short
from mpillm.report.page import svg
from mpillm.report.page.charts import Chart
from mpillm.report.page.page import page, write_page
from mpillm.report.page.run_analysis import Facts
from mpillm.report.request_log import RECORD
from mpillm.report.run_files import RunFiles
from mpillm.report.validity_checks import unchecked
from tests.helpers.pages import (
    EVIL,
    check_made_of,
    embedded,
    leaves,
    loads_nothing,
    poisoned,
    replaced,
    words,
)
from tests.helpers.run_directories import EMPTY, make_run, noted, spans, write, write_rows


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a disaggregated run of 10 s whose generation instance was the slow one."""
    latency = {"p50": 100.0, "p90": 150.0, "p99": 250.0, "mean": 110.0}
    per = [
        {"instance": i, "samples": 9, "tokens": t, "metrics": {"prompt_tokens": p, "generated_tokens": t}}
        for i, p, t in ((0, 1000, 0), (1, 0, 2000))
    ]
    path = make_run(
        tmp_path / "a run <&>",
        result={
            "status": "INVALID",
            "loadgen_result": "INVALID",
            "loadgen_unsatisfied": ["latency limits"],
            "loadgen_advice": ["TTFT: <b>too slow</b>"],
            "loadgen": {"ttft_latency_ms": 200.0, "tpot_latency_ms": None},
            "samples": 9,
            "tokens": 2000,
            "tokens_per_second": 200.0,
            "samples_per_second": 0.9,
            "test_s": 10.0,
            "ttft_ms": latency,
            "per_instance": per,
        },
    )
    roles = (["harness", "leader"], None), (["ctx"], 0), (["gen"], 1)
    plan = [
        {"rank": r, "roles": role, "node": "n0", "instance": i, "device": i}
        for r, (role, i) in enumerate(roles)
    ]
    write(path / "plan.json", {"world_size": 3, "ranks": plan})
    rows = [
        {
            "seconds": float(s),
            "instance": i,
            "prompt_tokens": 100 * s * (1 - i),
            "generated_tokens": 200 * s * i,
            "running": 4,
            "waiting": 0,
            "kv_cache_usage": 0.5,
        }
        for s in range(1, 11)
        for i in (0, 1)
    ]
    (path / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    telemetry = {
        "format": 1,
        "started": 1.7e9,
        "kinds": ["context", "decode", "mixed", "busy", "handoff"],
        "progress": {
            "seconds": [0, 5, 10],
            "issued": [9, 9, 9],
            "samples": [0, 4, 9],
            "tokens": [0, 900, 2000],
        },
        "cdf": {"ttft": {"ms": [50.0, 100.0, 250.0], "share": [0.1, 0.5, 1.0]}},
        "ranks": {
            "0": noted(EMPTY),
            "1": noted(spans(0, 3, 0), gpu_watts=100.0),
            "2": noted(spans(1, 10, 1), gpu_watts=300.0),
        },
    }
    write(path / "telemetry.json", telemetry)
    # One with its first token after a second, one whose only token came with its end.
    requests = [
        (0.0, 1.0, 5.0, 0, 9, 0, -1, -1, 0, 0),
        (0.0, math.nan, 2.0, 1, 1, 0, -1, -1, 0, 0),
        (2.5, 0.5, 1.0, 2, 2, 0, -1, -1, 0, 0),
    ]
    write_rows(path, np.array(requests, RECORD))
    return path


def test_a_person_reads_verdict_bottleneck_limits_and_cost(run: Path) -> None:
    text = words(write_page(run, price_per_gpu_hour=3.6))
    for part in (
        "INVALID a run <&>",
        "LoadGen does not accept this test. Not satisfied: latency limits. TTFT: <b>too slow</b>",
        "Bottleneck: generation 1",
        "90 % computing",
        "limit 200 ms",
        # 2 GPUs at 3.6 an hour are 0.002 a second, of 200 tokens
        "per million tokens 10.00 2 GPUs at 3.6 an hour",
        # 10 s of 100 W and of 300 W
        "energy per token 2.00 J",
        "context 300 J",
        "decode 2,700 J",
        "core_type torch command line",
    ):
        assert part in text
    assert "What is missing" not in text


def test_the_price_is_that_of_all_gpus_of_a_server(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", result={"tokens_per_second": 1000.0, "samples": 10, "test_s": 10.0})
    ranks = [
        {"rank": 0, "roles": ["harness"], "node": "n0", "instance": None, "device": None},
        {"rank": 1, "roles": ["executor"], "node": "n0", "instance": 0, "server_devices": [0, 1, 2, 3]},
    ]
    write(path / "plan.json", {"world_size": 2, "ranks": ranks})
    assert "per million tokens 4.00 4 GPUs at 3.6 an hour" in words(write_page(path, price_per_gpu_hour=3.6))


@pytest.mark.parametrize(("knows_steps", "share"), [(True, "computing"), (False, "holding requests")])
def test_the_table_names_the_meaning_of_an_instance_s_share(run: Path, knows_steps: bool, share: str) -> None:
    """The busy share of result.json, as printed, is that with requests: another figure if steps are known."""
    telemetry = json.loads((run / "telemetry.json").read_text())
    for noted_there in telemetry["ranks"].values():
        noted_there["knows_steps"] = knows_steps
    write(run / "telemetry.json", telemetry)
    text = words(write_page(run))
    assert f" tokens {share} requests waited" in text and " busy " not in text


def test_the_page_has_the_configuration_the_command_and_the_next_step(run: Path) -> None:
    cpu = {"model": "EPYC", "cores": 64}
    gpus = [{"name": "H200"}] * 2
    machine = {"cpu": cpu, "memory_bytes": 512e9, "gpus": gpus}
    write(run / "machines.json", {"n0": machine, "n1": machine})
    result = json.loads((run / "result.json").read_text())
    more = {
        "prompt_tokens": {"mean": 171.4, "max": 2251},
        "compiled": [],
        "scenario": "Server",
        "world_size": 3,
    }
    write(run / "result.json", result | more)
    config = {
        name: {"value": value, "source": "command line"}
        for name, value in {
            "scenarios": ["Server"],
            "core_type": "torch",
            "server_target_qps": 5.0,
            "max_output_len": 1024,
            "dtype": "bfloat16",
        }.items()
    }
    write(run / "config.json", config | {"quantization": {"value": "auto", "source": "default"}})
    text = words(write_page(run))
    for part in (
        "hardware 2 nodes: EPYC, 64 cores, 512 GB, 2 x H200",
        "precision dtype bfloat16, quantization auto (auto: as the checkpoint)",
        "prompts mean 171 tokens, at most 2,251",
        "answers mean 222 tokens, at most 1,024 (--max_output_len)",
        "repeat it python -m mpillm mpirun -n 3 run --scenarios Server --core_type torch",
        "next Find the highest VALID rate: python -m mpillm find-max-qps -n 3 --core_type torch",
    ):
        assert part in text, part


def test_the_page_names_tokens_that_were_counted_from_text(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert "counted from their text" not in words(write_page(run))
    counted = "Tokens of 7 answers are counted from their text: the server gives no token ids"
    first, *rest = result["per_instance"]
    for others, end in ((0, "."), (3, "; its usage gives 3 of them another number of tokens.")):
        one = {**first, "retokenized": 7, "other_text_length": others}
        write(run / "result.json", result | {"per_instance": [one, *rest]})
        assert f"{counted}{end}" in words(write_page(run))


def test_the_page_names_tokens_that_a_load_client_counted(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    client = {"name": "vllm-bench", "version": "", "completed": 7, "asked": 7, "failed": 0, "duration_s": 2.0}
    client |= {"requests_per_second": 3.5, "tokens_per_second": 9.0}
    write(run / "result.json", result | {"harness": client | {"self_counted": 7}})
    text = "Vllm-bench counts the tokens of 7 answers itself: it has no counts of the server."
    assert text in words(write_page(run))


def test_the_page_loads_nothing(run: Path) -> None:
    text = write_page(run).read_text()
    assert loads_nothing(text)
    assert "The MIT License" in text


def test_data_can_t_end_the_script(run: Path) -> None:
    write(run / "plan.json", {"ranks": [{"rank": 0, "roles": ["</script>"], "node": "n"}]})
    assert "</script>" not in page(RunFiles.read(run)).partition('id="data">')[2].partition("\n")[
        0
    ].removesuffix("</script>")


def test_joules_are_split_by_what_was_computed(run: Path) -> None:
    spent = Facts(RunFiles.read(run)).energy()
    assert spent is not None
    assert spent == pytest.approx((300, 2700, 0, 1000), abs=1)


def test_the_trace_has_a_process_per_rank(run: Path) -> None:
    write_page(run)
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0 harness + leader",
        "rank 1 context 0",
        "rank 2 generation 1",
    }
    assert sum(e["dur"] for e in events if e["name"] == "decode") == pytest.approx(9e6)
    assert min(e["ts"] for e in events if "ts" in e) == 0
    assert [e["ph"] for e in events if e["name"] == "request"] == ["s", "f", "s", "s", "f"]
    lanes = [e["tid"] for e in events if e["name"] == "to first token"]
    assert lanes[2] == lanes[1] != lanes[0], "the third began after the second had ended"


def test_an_instance_with_a_gap_between_its_ranks(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", result={"test_s": 10.0, "samples": 1})
    ranks = [{"rank": 0, "roles": ["harness"], "node": "n0", "instance": None}]
    ranks += [{"rank": r, "roles": ["executor"], "node": "n0", "instance": (r - 1) % 2} for r in (1, 2, 3, 4)]
    write(path / "plan.json", {"world_size": 5, "ranks": ranks})
    write(path / "telemetry.json", {"ranks": {str(rank): noted(EMPTY) for rank in range(5)}})
    text = words(write_page(path))
    assert "executor 0 ranks 1, 3" in text and "executor 1 ranks 2, 4" in text
    events = json.loads((path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 harness", *(f"rank {r} executor {(r - 1) % 2}" for r in (1, 2, 3, 4))]


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_a_test_that_only_the_checks_refuse_needs_no_advice_of_loadgen(tmp_path: Path, scenario: str) -> None:
    result = {"status": "INVALID", "loadgen_result": "VALID", "scenario": scenario, "test_s": 10.0}
    result["server_checks"] = {"no_cached_prompts": "9 prompt tokens came from a prefix cache"}
    text = words(write_page(make_run(tmp_path / "run", result=result)))
    assert "Remove the cause of the refusal, then repeat it: python -m mpillm rerun" in text
    assert "LoadGen's advice" not in text


FILES = (
    "result.json",
    "config.json",
    "plan.json",
    "telemetry.json",
    "timeline.jsonl",
    "mlperf_log_detail.txt",
)


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff\x80 not text")


def other(path: Path) -> None:
    """Keep the JSON, and make each number in it a word."""
    path.write_text(re.sub(r"(?<=[ \[])-?\d[\d.]*", '"x"', path.read_text()))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [gone, cut, garbage, other, folder])
@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_named_and_the_rest_is_on_the_page(
    run: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(run / name)
    text = words(write_page(run))
    assert "Files" in text
    if name != "config.json":
        assert "core_type torch" in text
    if damage is not other and name != "mlperf_log_detail.txt":
        assert re.search(rf"What is missing here .*{re.escape(name)}", text)
    json.loads((run / "trace.json").read_text())


def test_a_killed_run_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    path.mkdir()
    failure = {"rank": 2, "cause": "the process has ended", "traceback": ""}
    write(path / "result.json", {"status": "FAILED", "phase": "test", "failures": [failure]})
    text = words(write_page(path))
    for part in (
        "FAILED killed",
        "What went wrong in phase test",
        "rank 2: the process has ended",
        "plan.json is missing",
    ):
        assert part in text


def test_the_end_of_a_servers_log_keeps_its_lines(run: Path) -> None:
    """It was one bold paragraph."""
    cause = (
        "server 0 (vllm): was ended by signal 9 (SIGKILL)\nthe end of server_0.log:\n  | INFO <a>\n  | INFO b"
    )
    result = json.loads((run / "result.json").read_text())
    failed = {"status": "FAILED", "failures": [{"rank": 1, "cause": cause}]}
    lost = [{"instance": 0, "rank": 1, "at_s": 2.0, "cause": cause, "retried": 3}]
    write(run / "result.json", result | failed | {"lost": lost})
    text = write_page(run).read_text()
    assert "<strong>rank 1: server 0 (vllm): was ended by signal 9 (SIGKILL)</strong>" in text
    assert text.count("<pre>the end of server_0.log:\n  | INFO &lt;a&gt;\n  | INFO b</pre>") == 2


def test_ctrl_c_is_not_a_failure(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    failures = [{"rank": None, "cause": "interrupted (Ctrl-C)", "traceback": ""}]
    stopped = {"status": "FAILED", "phase": "test", "failures": failures, "samples": 330, "tokens": 0}
    write(run / "result.json", result | stopped)
    text = words(write_page(run))
    assert "STOPPED" in text and "Ctrl-C in phase test." in text
    assert "mean 0 tokens" not in text  # they are counted at the end
    assert "FAILED" not in text and "What went wrong" not in text


def test_a_test_of_less_than_a_second_lacks_nothing(run: Path) -> None:
    """Its instances tell what they compute once a second."""
    (run / "timeline.jsonl").unlink()
    assert "timeline.jsonl is missing" in words(write_page(run))
    result = json.loads((run / "result.json").read_text())
    write(run / "result.json", result | {"test_s": 0.5})
    assert "timeline.jsonl is missing" not in words(write_page(run))


def test_what_went_wrong_comes_first_and_links_the_log_of_the_rank(run: Path) -> None:
    (run / "ranks").mkdir(exist_ok=True)
    for rank in range(3):
        (run / f"ranks/rank_000{rank}.log").write_text("")
    (run / "timeline.jsonl").unlink()
    result = json.loads((run / "result.json").read_text())
    failures = [{"rank": 2, "cause": "out of memory", "traceback": "Traceback"}]
    write(run / "result.json", result | {"status": "FAILED", "phase": "test", "failures": failures})
    text = write_page(run).read_text()
    assert text.index("What went wrong") < text.index("What is missing here")
    assert text.count('href="ranks/rank_0002.log"') == 2  # beside the failure, and among the files
    assert text.count('href="ranks/rank_0001.log"') == 1
    assert 'href="trace.json"' in text


def test_the_page_names_the_server(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    config["trtllm_server_urls"] = {"value": ["http://gpu7:8000"], "source": "command line"}
    write(run / "config.json", config)
    assert "http://gpu7:8000" in words(write_page(run)).partition("Options")[0]


def test_a_distribution_marks_percentiles_on_an_axis_that_uses_the_width() -> None:
    cdf = Chart(
        "cdf-ttft", "First token", "% of samples", [40.0, 60.0, 90.0], [("", [1.0, 50.0, 100.0], 0)], "ms"
    )
    cdf.marks = [("p50 60 ms", 60.0)]
    text = svg.lines(cdf)
    xs = [float(point.split(",")[0]) for point in re.findall(r'points="([^"]+)"', text)[0].split()]
    assert xs[-1] - xs[0] > 280, "of 400"
    assert all(part in text for part in (">40 ms<", ">80 ms<", "p50 60 ms", ">at most, log scale<"))


@pytest.mark.parametrize("times", [[0.0], [0.0, 0.0], [0.0, 12.0]])
def test_a_distribution_of_tokens_that_came_at_once_is_drawn(times: list[float]) -> None:
    shares: list[float | None] = [100.0 * (i + 1) / len(times) for i in range(len(times))]
    cdf = Chart("cdf-tpot", "Per token", "% of samples", times, [("", shares, 0)], "ms")
    cdf.marks = [("p50 0 µs", 0.0)]
    assert "p50 0 µs" in svg.lines(cdf)


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 11.8, [0, 2.5, 5, 7.5, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (7, 7, [7]),
        (0, 30_000, [0, 10_000, 20_000, 30_000]),
    ],
)
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    assert svg.ticks(low, high) == found


@pytest.mark.parametrize("power", range(-9, 9))
@pytest.mark.parametrize("span", [1.001, 1.5, 8, 100, 1e5, 1e12])
def test_a_logarithmic_axis_has_a_few_ticks(power: int, span: float) -> None:
    found = svg.log_ticks(10.0**power, span * 10.0**power)
    assert 1 <= len(found) <= 8 and found == sorted(set(found))


def test_a_run_killed_with_rank_0_shows_what_it_had_written(run: Path) -> None:
    """No outcome and no telemetry: what ran, what instances computed, and the latencies of `requests.bin`."""
    for name in ("result.json", "telemetry.json"):
        (run / name).unlink()
    text = words(write_page(run))
    for part in (
        "no outcome",
        "llama2-70b · Offline · aggregated · core torch · 3 ranks",
        "result.json is missing",
        "The plan",
        "Tokens generated",
        "Time to first token",
    ):
        assert part in text
    assert "bottleneck" not in text
    charts = {one["name"]: one for one in json.loads(embedded((run / "report.html").read_text()))["charts"]}
    # The longest of the two first tokens, and the time of 8 tokens in 4 s.
    assert charts["cdf-ttft"]["x"][-1] == pytest.approx(1000)
    assert charts["cdf-tpot"]["x"][-1] == pytest.approx(500)


def test_tokens_that_all_come_at_once_have_no_chart(run: Path) -> None:
    telemetry = json.loads((run / "telemetry.json").read_text())
    telemetry["cdf"]["tpot"] = {"ms": [0.0, 0.0], "share": [0.5, 1.0]}
    write(run / "telemetry.json", telemetry)
    text = words(write_page(run))
    assert "Time to first token %" in text and "Time per output token %" not in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.05, "0.05"),
        (345, "345"),
        (2802, "2,802"),
        (12_000, "12k"),
        (999_949, "999.9k"),
        (999_951, "1M"),
        (12_345_678, "12.35M"),
    ],
)
def test_numbers_of_few_characters(number: float, text: str) -> None:
    assert short(number) == text


def test_the_plan_marks_the_rank_that_failed(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    failures = [{"rank": 2, "cause": "the process has ended"}]
    write(run / "result.json", result | {"status": "FAILED", "phase": "test", "failures": failures})
    text = words(write_page(run))
    assert "Failed: generation 1" in text and "generation 1 rank 2 failed" in text
    assert "bottleneck" not in text


def test_a_run_that_failed_in_its_test_lists_its_missing_lanes(run: Path) -> None:
    telemetry = json.loads((run / "telemetry.json").read_text())
    write(run / "telemetry.json", telemetry | {"ranks": {}})
    result = json.loads((run / "result.json").read_text())
    write(run / "result.json", result | {"status": "FAILED", "phase": "test"})
    text = words(write_page(run))
    assert "What is missing here what each rank did, its CPU, memory and GPU: ranks report it when" in text
    assert "Over time" in text and "bottleneck" not in text


def test_a_server_lacks_nothing_that_servers_write(run: Path) -> None:
    """It has no timeline, and counts what it answers only."""
    telemetry = json.loads((run / "telemetry.json").read_text())
    telemetry["progress"]["issued"] = [0, 0, 0]
    write(run / "telemetry.json", telemetry)
    result = json.loads((run / "result.json").read_text())
    write(run / "result.json", result | {"status": "SERVED"})
    (run / "timeline.jsonl").unlink()
    text = words(write_page(run))
    assert "What is missing" not in text and "Answered samples/s" in text
    charts = json.loads(embedded((run / "report.html").read_text()))["charts"]
    assert [line["label"] for line in charts[0]["lines"]] == ["answered"]


@pytest.mark.long
def test_a_million_requests_make_no_larger_page(run: Path) -> None:
    telemetry = json.loads((run / "telemetry.json").read_text())
    long = {name: 100 * values for name, values in telemetry["ranks"]["2"]["steps"].items()}
    telemetry["ranks"] |= {str(rank): noted(EMPTY) | {"steps": long} for rank in range(2, 40)}
    write(run / "telemetry.json", telemetry)
    assert write_page(run).stat().st_size < 3_000_000


def test_the_command_writes_pages_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--price_per_gpu_hour", "2"]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")
    assert "per million tokens" in words(run / "report.html")
    assert main(["report", str(run.parent)]) == 2
    assert "not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("doubts", [["the queue grew: 300 queries/s offered, 179 answered"], []])
def test_a_valid_test_with_doubts_is_not_marked_as_good(tmp_path: Path, doubts: list[str]) -> None:
    rates = {"offered_per_second": 300.0, "answered_per_second": 179.0, "queue_grew": bool(doubts)}
    result = rates | {"doubts": doubts, "latency_limits": False}
    html = page(RunFiles.read(make_run(tmp_path / "run", scenario="Server", result=result)))
    assert ('class="verdict valid"' in html) == (not doubts)
    assert ('class="verdict doubtful"' in html) == bool(doubts)
    assert all(f"Doubtful: {one}." in html for one in doubts)
    assert "300 queries/s offered, 179 answered" in html and "No latency limit was set" in html


def test_a_test_that_servers_spoilt_is_refused_though_loadgen_accepts_it(tmp_path: Path) -> None:
    cached = "99 prompt tokens came from a server's prefix cache"
    checks = {"no_cached_prompts": cached, "answer_lengths": "", "token_counts": None}
    result = {
        "status": "INVALID",
        "loadgen_result": "VALID",
        "server_checks": checks,
        "doubts": [cached, "disturbed"],
    }
    html = page(RunFiles.read(make_run(tmp_path / "run", result=result)))
    assert 'class="verdict invalid"' in html and "LoadGen accepts this test, but" in html
    assert "Not checked" not in html
    assert (
        "Refused: 99 prompt tokens" in html and "Doubtful: 99" not in html and "Doubtful: disturbed" in html
    )


@pytest.mark.parametrize("handed", [0, 3])
def test_unchecked_conditions_are_beside_the_verdict(tmp_path: Path, handed: int) -> None:
    """A test with unchecked conditions is VALID, such as with vLLM's --disable-log-stats."""
    checks = {"no_cached_prompts": None, "no_guesses": "", "contexts_arrived": None, "answer_lengths": None}
    result = {"status": "VALID", "server_checks": checks, "per_instance": [{"handed_over": handed}]}
    notes = [text.partition(":")[0] for text in unchecked(result)]
    assert notes == [
        "whether prompts came from a prefix cache, which MLPerf forbids",
        *["whether generation servers got all KV caches, or computed prompts again"][:handed],
    ]
    html = page(RunFiles.read(make_run(tmp_path / "run", result=result)))
    assert html.count("Not checked: ") == len(notes) and 'class="verdict valid"' in html
    assert unchecked({"server_checks": {"no_cached_prompts": ""}}) == unchecked({}) == []


TEXTS = ("result.json", "plan.json", "config.json", "telemetry.json", "ranks.json")


@pytest.fixture
def rich(run: Path) -> Path:
    """Return a run with everything that a page shows."""
    result = json.loads((run / "result.json").read_text())
    failure = {"rank": 1, "cause": "it fell", "traceback": "Traceback\n it", "doctor": "limits"}
    result |= {
        "status": "FAILED",
        "phase": "test",
        "failures": [failure],
        "lost": [{"instance": 1, "rank": 2, "cause": "gone", "at_s": 1.5, "retried": 3}],
        "phases_s": {"load": 1.5},
        "url": "http://here:1/v1",
        "doubts": ["others used the machine"],
        "mode": "disaggregated",
        "core_type": "dummy",
    }
    write(run / "result.json", result)
    (run / "ranks" / "rank_0001.log").touch()
    (run / "javascript:alert(1)").touch()
    (run / '"><x-evil>').touch()
    return run


def test_no_element_of_a_page_is_made_from_data(run: Path, rich: Path) -> None:
    """Whatever texts the files have, in every place that has one."""
    honest = page(RunFiles.read(rich))
    for name in TEXTS:
        before = json.loads((rich / name).read_text())
        write(rich / name, poisoned(before))
        check_made_of(page(RunFiles.read(rich)), honest)
        write(rich / name, before)
    for name in TEXTS:
        write(rich / name, poisoned(json.loads((rich / name).read_text())))
    text = page(RunFiles.read(rich))
    check_made_of(text, honest)
    assert "alert(1)" in text


@pytest.mark.long
@pytest.mark.parametrize("name", TEXTS)
def test_no_element_of_a_page_is_made_from_what_should_be_a_number(rich: Path, name: str) -> None:
    """Or a flag, or another word: each value in turn."""
    honest = page(RunFiles.read(rich))
    before = json.loads((rich / name).read_text())
    n_changed = 0
    for way in leaves(before):
        write(rich / name, replaced(before, way, EVIL))
        text = page(RunFiles.read(rich))
        check_made_of(text, honest)
        n_changed += text != honest
    assert n_changed > 0


def test_the_page_names_the_clock_of_each_latency(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert "By rank 0's clock: from when LoadGen issues a request until rank 0 has its tokens." in words(
        write_page(run)
    )
    first, *rest = result["per_instance"]
    of = {"started": 2, "ended": 2, "failed": 0, "outgrown": 0}
    times = {
        f"socket_{name}_{key}_ms": 40.0
        for name in ("ttft", "first_answer")
        for key in ("p50", "p90", "p99", "mean")
    }
    write(run / "result.json", result | {"per_instance": [{**first, **times}, *rest], "conversations": of})
    text = words(write_page(run))
    assert "By rank 0's clock: from when the load driver issues" in text
    assert "Rows of a client: by its rank's clock" in text
    assert "time to first answer token (after reasoning), client of context 0 40 ms 40 ms 40 ms 40 ms" in text
    write(run / "result.json", result | {"harness": {"name": "aiperf", "asked": 1, "completed": 0}})
    assert "By the clock of aiperf, from the request to its tokens." in words(write_page(run))
