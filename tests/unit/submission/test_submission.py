"""A submission's files, where the rules want them, and what is said of runs that don't fit, are not there or
are not good enough."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpillm import cli
from mpillm.config.options import parse_run
from mpillm.loadgen.logs import digest
from mpillm.report.run_directory import RunDirectory
from mpillm.submission import package
from mpillm.submission.package import command_of, truncated
from mpillm.submission.rules import ROUNDS, SYSTEM_MAY_BE_EMPTY, SYSTEM_MEANINGFUL, place
from mpillm.submission.runs import Run
from mpillm.workloads import get
from tests.helpers.run_directories import FULL_SIZE, MACHINE, log_entry, make_run

EOS = 2
GOOD = {"rouge1": 44.4, "rouge2": 22.1, "rougeL": 28.6, "tokens_per_sample": 290.5}


class Maker:
    """Makes runs, and submissions of them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def runs(self, scenario: str = "Offline", name: str = "", **config: Any) -> list[Path]:
        """The three runs of one result, judged: only accuracy.txt is made by hand, as its scores are no
        matter here."""
        first = None if scenario == "Offline" else [5]
        answers = [log_entry(i, [5, *range(10, 30), EOS], first) for i in range(50)]
        samples = get((config.get("benchmarks") or ["llama2-70b"])[0]).n_samples
        counts = {
            f"effective_{kind}": samples
            for kind in ("performance_sample_count", "accuracy_sample_count", "samples_per_query")
        }
        detail = FULL_SIZE | counts | config.pop("detail", {})
        paths = [
            make_run(
                self.folder / f"{name}{scenario}-{kind}",
                kind,
                scenario,
                answers if kind != "performance" else (),
                detail=detail,
                **config,
            )
            for kind in ("performance", "accuracy", "TEST06")
        ]
        self.scored(paths[1], GOOD)
        assert cli.main(["compliance", str(paths[2])]) == 0
        return paths

    def scored(self, run: Path, scores: dict[str, float]) -> None:
        """An accuracy.txt with these scores."""
        (run / "accuracy.txt").write_text(f"{scores}\n\nhash={digest(run / 'mlperf_log_accuracy.json')}\n")

    def submit(self, *words: object, code: int = 0) -> str:
        """Return what is printed; of exit code 2 the message."""
        head = ["submission", "--output", self.folder / "out", "--submitter", "Us", "--system_name", "8xH200"]
        self.capsys.readouterr()
        assert cli.main([str(word) for word in [*head, *words]]) == code
        captured = self.capsys.readouterr()
        return captured.err if code == 2 else captured.out

    @property
    def tree(self) -> Path:
        return self.folder / "out" / "closed" / "Us"


@pytest.fixture
def maker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Maker]:
    yield Maker(tmp_path, capsys)


MEASURED = {"starting_weights_filename": "llama", "weight_data_types": "fp8"}


def measured(maker: Maker) -> list[object]:
    file = maker.folder / "measurements.json"
    file.write_text(json.dumps(MEASURED))
    return ["--measurements", file]


STOPPED = "Run unsuccessful. Processed 100 queries."


def said(out: str) -> list[str]:
    """Return the list of what is wrong."""
    return [
        line.strip()
        for line in out.splitlines()
        if line.startswith(("  rejected by the checker", "  against the rules"))
    ]


def test_layout(maker: Maker) -> None:
    runs = maker.runs() + maker.runs("Server")
    out = maker.submit(*runs, *measured(maker))
    assert said(out) == []
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


def test_system_description(maker: Maker) -> None:
    described = maker.folder / "system.json"
    described.write_text(json.dumps({"cooling": "liquid", "status": "preview"}))
    out = maker.submit(*maker.runs(), "--system_description", described, code=4)
    system = json.loads((maker.tree / "systems" / "8xH200.json").read_text())
    assert set(system) == {*SYSTEM_MEANINGFUL, *SYSTEM_MAY_BE_EMPTY}
    assert all(system[name] for name in SYSTEM_MEANINGFUL)
    expected = {
        "submitter": "Us",
        "division": "closed",
        "status": "preview",
        "cooling": "liquid",
        "system_name": "8xH200",
        "number_of_nodes": 1,
        "host_processor_model_name": "CPU 9000",
        "host_processors_per_node": 2,
        "host_processor_core_count": 32,
        "host_memory_capacity": "512 GiB",
        "host_storage_type": "NVMe SSD",
        "host_networking": "InfiniBand 400 Gbit/s, InfiniBand 400 Gbit/s",
        "host_network_card_count": "2x InfiniBand",
        "accelerators_per_node": "2",  # of the node's eight, those that were used
        "accelerator_model_name": "NVIDIA H200",
        "accelerator_memory_capacity": "141 GiB",
        "framework": "PyTorch 2.13.0",
        "operating_system": "Debian 12, kernel 6.1",
    }
    assert {name: system[name] for name in expected} == expected
    assert system["other_software_stack"].startswith("mpillm 0.1.0, Open MPI v5, Python 3.11, numpy 2.4.6")
    blank = re.search(r'the system description has "N/A" for: (.*) \(', out)
    assert blank and set(blank[1].split(", ")) == {
        *("host_memory_configuration", "host_networking_topology", "accelerator_host_interconnect"),
        *("accelerator_memory_configuration", "accelerator_interconnect"),
    }


@pytest.mark.parametrize(
    ("told", "framework"),
    [
        ([["vLLM 0.32.0+cpu"], ["mpillm 0.1.0"]], "mpillm 0.1.0, vLLM 0.32.0+cpu"),
        ([["vLLM 0.32.0+cpu"], []], "N/A"),  # one of the servers does not say
    ],
)
@pytest.mark.parametrize("core", ["trtllm_endpoint", "triton_grpc"])
def test_the_framework_of_a_client_is_what_its_servers_say(
    maker: Maker, told: list[list[str]], framework: str, core: str
) -> None:
    result = {"per_instance": [{"instance": i, "frameworks": names} for i, names in enumerate(told)]}
    out = maker.submit(*maker.runs(core_type=core, result=result), code=4)
    system = json.loads((maker.tree / "systems" / "8xH200.json").read_text())
    assert system["framework"] == framework
    blank = re.search(r'the system description has "N/A" for: (.*) \(', out)
    assert blank and ("framework" in blank[1].split(", ")) == (framework == "N/A")


def test_a_machine_without_gpus(maker: Maker) -> None:
    bare = {
        **MACHINE,
        "gpus": [],
        "gpu_driver": "",
        "network": [],
        "cpu": {**MACHINE["cpu"], "max_mhz": None},  # type: ignore[dict-item]
    }
    maker.submit(*maker.runs(machine=bare), code=4)
    system = json.loads((maker.tree / "systems" / "8xH200.json").read_text())
    assert (system["accelerators_per_node"], system["accelerator_model_name"], system["host_networking"]) == (
        "0",
        "N/A",
        "N/A",
    )


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"dtype": "bfloat16"}, {}, ("bf16", "none")),
        ({"dtype": "auto"}, {"config.json": {"torch_dtype": "float16"}}, ("fp16", "none")),
        (
            {"dtype": "auto"},
            {
                "config.json": {
                    "quantization_config": {
                        "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}}
                    }
                }
            },
            ("fp8", "quantization (fp8)"),
        ),
        ({"quantization": "int8"}, {"config.json": {"dtype": "bfloat16"}}, ("int8", "quantization (int8)")),
        ({"engine_dir": "engine"}, {"engine": ("W8A16", "float16")}, ("int8", "quantization (W8A16)")),
        (
            {"engine_dir": "engine"},
            {"engine": ("FP8_PER_CHANNEL_PER_TOKEN", "float16")},
            ("fp8", "quantization (FP8_PER_CHANNEL_PER_TOKEN)"),
        ),
        ({"engine_dir": "engine"}, {"engine": (None, "float16")}, ("fp16", "none")),
    ],
)
def test_measurements(
    maker: Maker, config: dict[str, Any], files: dict[str, Any], expected: tuple[str, str]
) -> None:
    model = maker.folder / "Llama-2-70b"
    model.mkdir()
    if "engine" in files:
        algorithm, dtype = files.pop("engine")
        (maker.folder / "engine").mkdir()
        pretrained = {"dtype": dtype, "quantization": {"quant_algo": algorithm}}
        (maker.folder / "engine" / "config.json").write_text(json.dumps({"pretrained_config": pretrained}))
        config = {"engine_dir": str(maker.folder / "engine")}
    for name, content in files.items():
        (model / name).write_text(json.dumps(content))
    maker.submit(*maker.runs(model_path=str(model), **config), code=4)
    found = json.loads((maker.tree / "results/8xH200/llama2-70b-99.9/Offline/measurements.json").read_text())
    assert (found["weight_data_types"], found["weight_transformations"]) == expected
    assert (found["starting_weights_filename"], found["input_data_types"], found["retraining"]) == (
        "Llama-2-70b",
        "int32",
        "N",
    )


def test_what_is_missing_is_listed(maker: Maker) -> None:
    runs = maker.runs()
    maker.scored(runs[1], {"rouge1": 44.1, "rougeL": 28.6, "tokens_per_sample": 600.5})
    assert said(maker.submit(*runs, *measured(maker), code=4))[0] == (
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
        result={"status": "INVALID"},
        detail={**FULL_SIZE, "early_stopping_met": False, "early_stopping_ttft_result": f" * {STOPPED}"},
        enable_kv_cache_reuse=True,
    )
    (invalid / "mlperf_log_summary.txt").write_text("Result is : INVALID\n  Min duration satisfied : NO\n")
    (runs[2] / "TEST06" / "verify_accuracy.txt").write_text("TEST06 verification failed\n")
    out = maker.submit(runs[1], runs[2], invalid, *measured(maker), "--force", code=4)
    stops, offline, server = (
        "rejected by the checker (it stops there)",
        "llama2-70b-99.9 Offline",
        "llama2-70b-99.9 Server",
    )
    assert said(out) == [
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
        f"against the rules: {server}: {invalid}: KV cache reuse was on, which MLPerf forbids",
    ]
    assert (
        maker.tree / "results/8xH200/llama2-70b-99.9/Server/performance/run_1/mlperf_log_detail.txt"
    ).is_file()


def test_less_than_the_benchmark_asks_for(maker: Maker) -> None:
    """LoadGen calls a run VALID that was shortened, has limits of its own, or answers less.

    The checker and the rules don't.
    """
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
            for text in said(out)
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
        said(
            maker.submit(
                *maker.runs(name="again-", **made), *maker.runs("Server"), *measured(maker), "--force"
            )
        )
        == []
    )


def test_rounds_and_scenarios(maker: Maker) -> None:
    """mixtral-8x7b is in round v6.0, not in v6.1; its closed division wants Server."""
    out = maker.submit(
        *maker.runs(benchmarks=["mixtral-8x7b"], accuracy_target=0.99), *measured(maker), code=4
    )
    assert "round v6.1, whose seeds its LoadGen has, has no mixtral-8x7b" in out
    assert "mixtral-8x7b: the closed division needs Server too" in out
    seeds = ("effective_qsl_rng_seed", "effective_sample_index_rng_seed", "effective_schedule_rng_seed")
    older = dict(zip(seeds, ROUNDS[1].seeds, strict=True))
    runs = maker.runs(name="v6.0-", benchmarks=["mixtral-8x7b"], accuracy_target=0.99, detail=older)
    assert "--version v6.0" in maker.submit(*runs, "--force", code=4)
    strange = maker.runs(name="strange-", detail={"effective_qsl_rng_seed": 1})
    assert "has the seeds of no round" in maker.submit(*strange, "--force", code=4)


def test_open_division(maker: Maker) -> None:
    """No compliance runs are asked for, no other scenario, and any model may be run."""
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


def test_existing_output(maker: Maker) -> None:
    runs = maker.runs()
    maker.submit(*runs, code=4)
    mark = maker.tree / "mark"
    mark.touch()
    assert f"{maker.tree} exists: choose another --output, or --force to replace it" in maker.submit(
        *runs, code=2
    )
    assert mark.exists()
    maker.submit(*runs, "--force", code=4)
    assert not mark.exists()
    assert [path.name for path in maker.tree.parent.iterdir()] == ["Us"], "nothing is left beside it"


def test_a_submission_that_can_not_be_written_leaves_what_was_there(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = maker.runs()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(package, "write_text", full)
        assert "No space left on device" in maker.submit(*runs, code=2)
    assert not (maker.folder / "out").exists()
    maker.submit(*runs, code=4)
    (maker.tree / "mark").touch()
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name == "tree":
            full()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    assert "No space left on device" in maker.submit(*runs, "--force", code=2)
    assert (maker.tree / "mark").exists()
    assert [path.name for path in maker.tree.parent.iterdir()] == ["Us"]


def test_bad_input(maker: Maker) -> None:
    performance, accuracy, _ = maker.runs()

    def says(expected: str, *words: object) -> None:
        assert expected in maker.submit(*words, code=2)
        assert not (maker.folder / "out").exists()

    says("no such run directory", maker.folder / "none")
    says("is given twice", performance, performance)
    says(
        "--division clsed: not one of closed, open (did you mean 'closed'?)",
        performance,
        "--division",
        "clsed",
    )
    says("must be a folder name", performance, "--submitter", "../us")
    says("--submitter '': expected a text that is not empty", performance, "--submitter", "")
    says("unknown option --devision (did you mean '--division'?)", performance, "--devision", "open")
    says(
        "failed in phase 'test': x",
        make_run(
            maker.folder / "f", result={"status": "FAILED", "phase": "test", "failures": [{"cause": "x"}]}
        ),
    )
    says("start one with --benchmarks", make_run(maker.folder / "any", benchmarks=None))
    says("there is no workload resnet50", make_run(maker.folder / "other", benchmarks=["resnet50"]))
    says(
        "are both the performance run of llama2-70b-99.9 Offline",
        performance,
        make_run(maker.folder / "second"),
    )
    says(
        "--dtype is 'bfloat16' and 'float32'",
        performance,
        make_run(maker.folder / "fp32", "accuracy", dtype="float32"),
    )
    says(
        "--quantization is None and 'int8'",
        performance,
        make_run(maker.folder / "int8", "accuracy", quantization="int8"),
    )
    elsewhere = {**MACHINE, "memory_bytes": 256 << 30}
    says(
        "not made on the same system: memory_bytes",
        performance,
        make_run(maker.folder / "else", "accuracy", machine=elsewhere),
    )
    newer = {**MACHINE, "software": {**MACHINE["software"], "mlcommons-loadgen": "6.0.18"}}  # type: ignore[dict-item]
    says(
        "system: software: mlcommons-loadgen 6.0.17 and 6.0.18",
        performance,
        make_run(maker.folder / "new", "accuracy", machine=newer),
    )
    says(
        "not made on the same system: workers 2 and 3",
        performance,
        make_run(maker.folder / "more", "accuracy", workers=3),
    )
    audit = make_run(maker.folder / "audit", audit_conf="own.config")
    says("with an audit.config that is not TEST06's", audit)
    says("there is no Offline of it", make_run(maker.folder / "inter", benchmarks=["llama2-70b-interactive"]))
    for name in ("mlperf_log_detail.txt", "machines.json", "plan.json"):
        (broken := make_run(maker.folder / f"no-{name}") / name).unlink()
        says(name, broken.parent)
    garbled = make_run(maker.folder / "garbled")
    (garbled / "machines.json").write_text("{")
    says("machines.json:1: not valid JSON", garbled)
    beside = make_run(maker.folder / "beside", "accuracy")
    for i, (name, text) in enumerate(
        (
            *(
                ("machines.json", "{}"),
                ("machines.json", '{"n0": {}}'),
                ("plan.json", "[]"),
                ("plan.json", '{"ranks": []}'),
            ),
            *(("ranks.json", "[]"), ("result.json", "[]"), ("config.json", "{}")),
            ("result.json", '{"status": "VALID", "test_mode": "PerformanceOnly"}'),  # no scenario
        )
    ):
        (other := make_run(maker.folder / f"other-{i}") / name).write_text(text)
        says(f"{name}: damaged, or not written by a run", other.parent, beside)

    file = maker.folder / "given.json"
    for text, expected in (
        ("{", "not valid JSON"),
        ("[]", f"{file}: not a JSON object"),
        ('{"coling": "air"}', f"--system_description {file}: no field 'coling' (did you mean 'cooling'?)"),
        ('{"cooling": ""}', "cooling is empty"),
        ('{"status": "soon"}', "status 'soon': not one of available, preview, rdi"),
        ('{"submitter": "Them"}', "submitter is 'Them', but --submitter Us"),
    ):
        file.write_text(text)
        says(expected, performance, "--system_description", file)
    says("no such file", performance, "--measurements", maker.folder / "none.json")
    with (accuracy / "mlperf_log_accuracy.json").open("a") as log:
        log.write(" ")
    says("accuracy.txt does not belong to the mlperf_log_accuracy.json beside it", performance, accuracy)
    (maker.folder / "a-file").touch()
    out = maker.submit(performance, "--output", maker.folder / "a-file", code=2)
    assert f"the submission in {maker.folder / 'a-file'} can't be written" in out and "Not a directory" in out


def test_the_command_gives_the_run_again(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, whose sources are told one by one, and what stands in the environment, are part of it."""
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "kvcache_free_gpu_mem_frac:0.7")
    words = (
        "--core_type dummy --core_options a:1,b:true --end_ids 1,2 --save_outputs --triton_grpc_ports"
        " h:1,2|i:3 --max_batch_size 4"
    )
    flags = "--trtllm_runtime_flags max_num_tokens:99,use_inflight_batching:false --trtllm_build_flags a:x"
    config = parse_run([*words.split(), *flags.split(), "--stop_words", '["#", [1, 2]]'])
    (maker.folder / "config.json").write_text(json.dumps(config.to_json()))
    run = Run(RunDirectory(maker.folder, {}, {"world_size": 3}), "performance", "llama2-70b-99", "Offline")
    monkeypatch.delenv("TRTLLM_RUNTIME_FLAGS")
    head, _, options = command_of(run).partition(" run ")
    assert head == "python -m mpillm mpirun -n 3"
    assert parse_run(shlex.split(options)).values == config.values
