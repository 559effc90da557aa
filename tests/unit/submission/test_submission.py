"""A submission's files are where the rules want them, and what is missing or not good enough is listed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from mpillm.options.options import parse_run
from mpillm.submission.judged_run import JudgedRun
from mpillm.submission.package import command_of, truncated
from mpillm.submission.rules import place
from mpillm.submission.submitted_runs import SubmittedRun
from mpillm.workloads import get
from mpillm.workloads.rounds import ROUNDS
from tests.helpers.run_directories import FULL_SIZE, make_run
from tests.helpers.submissions import STOPPED, Maker, measured, problems_of

AWAY = {"index": 1, "restarts": [{"at_s": 9.5, "back_after_s": 20.0, "why": "it ended"}]}


def test_layout(maker: Maker) -> None:
    runs = maker.runs() + maker.runs("Server")
    out = maker.submit(*runs, *measured(maker))
    assert problems_of(out) == []
    assert "--version v6.1 --submitter Us" in out
    root = maker.tree / "results" / "8xH200" / "llama2-70b-99.9"
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    of_one = (
        *("measurements.json", "README.md", "user.conf"),
        *(f"performance/run_1/mlperf_log_{name}.txt" for name in ("detail", "summary")),
        *(f"accuracy/mlperf_log_{name}.txt" for name in ("detail", "summary")),
        *("accuracy/mlperf_log_accuracy.json", "accuracy/accuracy.txt"),
        *("TEST06/verify_accuracy.txt", "TEST06/accuracy/mlperf_log_accuracy.json"),
        *(f"TEST06/performance/run_1/mlperf_log_{name}.txt" for name in ("detail", "summary")),
    )
    assert found == {f"{scenario}/{name}" for scenario in ("Offline", "Server") for name in of_one}
    for name in (
        "performance/run_1/mlperf_log_detail.txt",
        "performance/run_1/mlperf_log_summary.txt",
        "user.conf",
    ):
        assert (root / "Server" / name).read_bytes() == (runs[3] / Path(name).name).read_bytes()
    assert (maker.tree / "src" / "mpillm" / "mpillm" / "cli.py").is_file()
    assert (maker.tree / "src" / "llama2-70b-99.9" / "README.md").is_file()
    assert not list(maker.tree.rglob("__pycache__"))
    readme = (root / "Offline" / "README.md").read_text()
    assert (
        "python -m mpillm mpirun -n 3 run --benchmarks llama2-70b --scenarios Offline --accuracy_target 0.999"
        in readme
    )


def test_accuracy_log_is_cut_at_both_ends(maker: Maker) -> None:
    runs = maker.runs()
    maker.submit(*runs, code=4)
    whole = (runs[1] / "mlperf_log_accuracy.json").read_bytes()
    assert len(whole) > 10 * 1024
    cut = (
        maker.tree / "results/8xH200/llama2-70b-99.9/Offline/accuracy/mlperf_log_accuracy.json"
    ).read_bytes()
    assert cut == truncated(whole) == whole[:4096] + b"\n\n...\n\n" + whole[-4096:]
    assert len(cut) < 10 * 1024
    assert truncated(b"short") == b"short"


@pytest.mark.long
def test_missing_runs_and_files_are_listed(maker: Maker) -> None:
    runs = maker.runs()
    maker.scored(runs[1], {"rouge1": 44.1, "rougeL": 28.6, "tokens_per_sample": 600.5})
    assert problems_of(maker.submit(*runs, *measured(maker), code=4))[0] == (
        f"rejected by the checker (accuracy_result_check): llama2-70b-99.9 Offline: {runs[1]}: the accuracy"
        " target is not reached: rouge1 44.10 (at least 44.39), rouge2 missing (at least 22.01),"
        " tokens_per_sample 600.50 (at least 265.00, at most 323.90)"
    )
    maker.submit(*runs[:2], *measured(maker), "--division", "open")
    (runs[1] / "accuracy.txt").unlink()
    invalid = make_run(
        maker.folder / "server",
        "performance",
        "Server",
        result={
            "status": "INVALID",
            "lost": [{"instance": 2, "role": "executor"}],
            "per_instance": [{"instance": 0, "server_cached_tokens": 4096.0, "server": AWAY}],
        },
        detail={**FULL_SIZE, "early_stopping_met": False, "early_stopping_ttft_result": f" * {STOPPED}"},
        enable_kv_cache_reuse=True,
        acceptance_length=2.5,
    )
    (invalid / "mlperf_log_summary.txt").write_text("Result is : INVALID\n  Min duration satisfied : NO\n")
    (runs[2] / "TEST06" / "verify_accuracy.txt").write_text("TEST06 verification failed\n")
    out = maker.submit(runs[1], runs[2], invalid, *measured(maker), "--force", code=4)
    stops, offline, server = (
        "rejected by the checker (it stops there)",
        "llama2-70b-99.9 Offline",
        "llama2-70b-99.9 Server",
    )
    assert problems_of(out) == [
        f"{stops}: {offline}: no performance run: a run without --test_mode and --compliance_test",
        f"rejected by the checker (accuracy_result_check): {offline}: {runs[1]}: no accuracy.txt:"
        f" `python -m mpillm accuracy {runs[1]}` makes it",
        f"rejected by the checker (accuracy_check): {offline}: {runs[2]}: TEST06 failed: no First token"
        " check pass, no EOS check pass, no Sample length check pass"
        f" ({runs[2]}/TEST06/verify_accuracy.txt)",
        f"{stops}: {server}: no accuracy run: a run with --test_mode AccuracyOnly",
        f"rejected by the checker (dir_exists_check, accuracy_check): {server}: no TEST06 run: a run with"
        " --compliance_test TEST06",
        f"rejected by the checker (latency_check): {server}: {invalid}: early stopping was not satisfied"
        f" (TTFT: {STOPPED})",
        f"against the rules: {server}: {invalid}: LoadGen calls it INVALID (not satisfied: minimum duration)",
        f"against the rules: {server}: {invalid}: instance 2 (executor) was lost, and the run went on"
        " without it (--on_instance_loss continue)",
        f"against the rules: {server}: {invalid}: server 1 was lost 9.5 s into the test, and available again"
        " 20.0 s later: it ended",
        f"against the rules: {server}: {invalid}: KV cache reuse was on, which MLPerf forbids",
        f"against the rules: {server}: {invalid}: --acceptance_length 2.5 replaced the model's choice of"
        " tokens",
        f"against the rules: {server}: {invalid}: 4,096 prompt tokens came from a server's prefix"
        " cache, which MLPerf forbids: vLLM has --no-enable-prefix-caching, SGLang --disable-radix-cache",
    ]
    assert (
        maker.tree / "results/8xH200/llama2-70b-99.9/Server/performance/run_1/mlperf_log_detail.txt"
    ).is_file()


def test_checks_that_servers_do_not_report_are_listed(maker: Maker) -> None:
    """A run is VALID without them, but the submitter must know."""
    runs = maker.runs()
    checks = {"no_cached_prompts": None, "no_guesses": None, "token_counts": ""}
    file = runs[0] / "result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "server_checks": checks}))
    out = maker.submit(*runs, *maker.runs("Server"), *measured(maker))
    assert problems_of(out) == []
    lines = [line for line in out.splitlines() if "not checked" in line]
    assert [line.partition(" (/metrics)")[0] for line in lines] == [
        f"  not checked: llama2-70b-99.9 Offline: {runs[0]}: whether prompts came from a prefix cache, which"
        " MLPerf forbids: servers give no count of them",
        f"  not checked: llama2-70b-99.9 Offline: {runs[0]}: whether draft tokens were used, which the"
        " workload's rules forbid: servers give no count of them",
    ]


@pytest.mark.long
def test_less_than_the_benchmark_requires(maker: Maker) -> None:
    """LoadGen calls a run VALID that was shortened, has limits of its own, or answers less; the checker and
    the rules reject it."""
    shortened = {"effective_min_duration_ms": 10_000, "effective_samples_per_query": 64}
    shortened |= {"effective_performance_sample_count": 48, "effective_accuracy_sample_count": 48}
    options: dict[str, Any] = {"max_output_len": 16, "end_ids": [2, 13], "stop_words": None}
    options |= {"temperature": 0.5, "top_k": 0, "load_format": "dummy"}
    runs = maker.runs(detail=shortened, dataset="synthetic", **options)
    (runs[0] / "user.conf").write_text(
        "# x.y = 1\n*.Offline.target_qps = 3\nllama2-70b.Server.ttft_latency = 9000\n"
    )
    out = maker.submit(runs[0], runs[1], *measured(maker), code=4)
    rejected, forbidden = (
        [
            text.partition(f"Offline: {runs[0]}: ")[2]
            for text in problems_of(out)
            if text.startswith(why) and f"{runs[0]}: " in text
        ]
        for why in ("rejected", "against")
    )
    other = [
        "--max_output_len was 16, the benchmark's is 1024",
        "--end_ids had [13], which end no answer of the benchmark",
        "answers were sampled (--temperature 0.5), the benchmark's are greedy",
        "the weights were random: a preset's, or --load_format dummy",
        "the data set was random tokens (--dataset synthetic)",
    ]
    less = [
        "performance_sample_count was 48 samples; must be at least 24576",
        "min_duration_ms was 10000 ms; must be at least 600000",
    ]
    per_query = "samples_per_query was 64 samples; must be at least 24576"
    conf = f"{runs[0] / 'user.conf'} sets ttft_latency: that is the benchmark's"
    assert rejected == [*less, per_query] and forbidden == [conf, *other]
    assert f"{runs[1]}: accuracy_sample_count was 48 samples; the benchmark has 24576" in out
    out = maker.submit(*runs[:2], *measured(maker), "--division", "open", code=4)
    assert (
        less[0] in out
        and less[1] in out
        and conf in out
        and not any(line in out for line in [*other, per_query])
    )
    made: dict[str, Any] = {
        "top_k": 1,
        "temperature": 0.5,
        "max_output_len": 1024,
        "end_ids": [2],
        "min_output_len": 1,
    }
    assert (
        problems_of(
            maker.submit(
                *maker.runs(name="again-", **made), *maker.runs("Server"), *measured(maker), "--force"
            )
        )
        == []
    )


@pytest.mark.long
def test_rounds_and_scenarios(maker: Maker) -> None:
    """mixtral-8x7b is in round v6.0, not in v6.1; its closed division wants Server."""
    out = maker.submit(
        *maker.runs(benchmarks=["mixtral-8x7b"], accuracy_target=0.99), *measured(maker), code=4
    )
    assert "round v6.1, whose seeds its LoadGen has, has no mixtral-8x7b" in out
    assert "mixtral-8x7b: the closed division also needs Server" in out
    seeds = ("effective_qsl_rng_seed", "effective_sample_index_rng_seed", "effective_schedule_rng_seed")
    older = dict(zip(seeds, ROUNDS[1].seeds, strict=True))
    runs = maker.runs(name="v6.0-", benchmarks=["mixtral-8x7b"], accuracy_target=0.99, detail=older)
    assert "--version v6.0" in maker.submit(*runs, "--force", code=4)
    strange = maker.runs(name="strange-", detail={"effective_qsl_rng_seed": 1})
    assert "has the seeds of no round" in maker.submit(*strange, "--force", code=4)


def test_runs_of_two_rounds(maker: Maker) -> None:
    """The checker reads the seeds of performance runs, and gets one round."""
    seeds = ("effective_qsl_rng_seed", "effective_sample_index_rng_seed", "effective_schedule_rng_seed")
    older = dict(zip(seeds, ROUNDS[1].seeds, strict=True))
    offline, server = maker.runs(), maker.runs("Server", detail=older)
    out = maker.submit(*server[::-1], *offline, *measured(maker), code=4)
    assert "--version v6.1" in out
    why = "has the seeds of round v6.0, other runs have those of v6.1; a submission has one round"
    assert problems_of(out) == [
        *(f"against the rules: {run}: {why}" for run in server[:0:-1]),
        f"rejected by the checker (seeds_check): {server[0]}: {why}",
    ]


@pytest.mark.long
def test_open_division(maker: Maker) -> None:
    """It asks for no compliance runs and no other scenario, and takes any model."""
    runs = maker.runs(model_scale="tiny")
    maker.submit(*runs[:2], "--division", "open", *measured(maker))
    assert "tiny" in maker.submit(*runs[:2], "--division", "closed", *measured(maker), code=4)
    assert (maker.folder / "out" / "open" / "Us" / "systems" / "8xH200.json").is_file()


@pytest.mark.parametrize(
    ("workload", "target", "scenario", "expected"),
    [
        ("llama2-70b", 0.99, "Offline", ("llama2-70b-99", "Offline")),
        ("llama2-70b", 0.999, "Server", ("llama2-70b-99.9", "Server")),
        ("llama2-70b-interactive", 0.999, "Server", ("llama2-70b-99.9", "Interactive")),
        ("mixtral-8x7b", 0.99, "Server", ("mixtral-8x7b", "Server")),
        ("llama3.1-405b-interactive", 0.99, "Server", ("llama3.1-405b", "Interactive")),
    ],
)
def test_place(workload: str, target: float, scenario: str, expected: tuple[str, str]) -> None:
    assert place(get(workload), target, scenario) == expected


def test_the_command_gives_the_run_again(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has the flags, whose sources are recorded one by one, and what the environment set."""
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "kvcache_free_gpu_mem_frac:0.7")
    words = (
        "--model_path tiny-llama --core_options use_custom_all_reduce:false --end_ids 1,2 --save_outputs"
        " --max_batch_size 4"
    )
    flags = "--trtllm_runtime_flags max_num_tokens:99,use_inflight_batching:false"
    config = parse_run([*words.split(), *flags.split(), "--stop_words", '["#", [1, 2]]'])
    (maker.folder / "config.json").write_text(json.dumps(config.to_json()))
    run = SubmittedRun(
        JudgedRun(maker.folder, {}, {"world_size": 3}), "performance", "llama2-70b-99", "Offline"
    )
    monkeypatch.delenv("TRTLLM_RUNTIME_FLAGS")
    head, _, options = command_of(run).partition(" run ")
    assert head == "python -m mpillm mpirun -n 3"
    assert parse_run(shlex.split(options)).values == config.values
