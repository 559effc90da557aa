"""What is stated and has no effect: every option, for every command and core, and who reads it there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpillm
from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.core_names import WITH_BACKENDS
from mpillm.data.dataset import Synthetic
from mpillm.options.disagg_values import CORE
from mpillm.options.fields import BY_NAME, FIELDS
from mpillm.options.fields.effects import RUN
from mpillm.options.options import parse_run, parse_serve
from mpillm.options.run_config import RunConfig
from mpillm.options.unused_options import check_unused, unused_in_role, unused_options
from mpillm.runtime import choose_samples
from tests.helpers.configured import DUMMY
from tests.helpers.every_option import COMMANDS, config_of, outcomes


def table() -> dict[str, dict[str, dict[str, str]]]:
    """Return what comes of each option, by option, command and core."""
    made = {}
    for field in FIELDS:
        by_core = {core: outcomes(core, field) for core in WITH_BACKENDS}
        made[field.name] = {
            command: {core: by_core[core][place] for core in WITH_BACKENDS}
            for place, command in enumerate(COMMANDS)
        }
    return made


SETS_THE_CORE = (
    *("harness_type", "use_triton"),
    *("server", "server_args", "server_memory_limit", "server_nodes", "clients_per_server"),
    *("triton_num_frontends_per_model", "triton_model_repo", "tritonserver"),
)
NAMES_A_FILE = ("config_file", "llm_gen_config_path", "core_type")


@pytest.mark.long
def test_every_option_has_an_effect_or_is_reported_for_every_command_and_core() -> None:
    made = table()
    for name, commands in made.items():
        effects = [what for cores in commands.values() for what in cores.values()]
        assert set(effects) <= {"effect", "line", "error"}
        if name not in NAMES_A_FILE:
            used = bool(BY_NAME[name].effect.uses) and name not in (
                "model_scale",
                "power_setting",
                "config_suffix",
            )
            assert ("effect" in effects) == used, f"{name}: it is unused, or its declaration is wrong"
        if "error" in commands["run"].values() and name not in (*NAMES_A_FILE, *SETS_THE_CORE):
            assert BY_NAME[name].effect.measured, name
            assert "error" not in commands["generate-engines"].values(), f"{name}: a stage measures nothing"
    run = {name: commands["run"] for name, commands in made.items()}
    for name in (
        "quantization",
        "kv_cache_dtype",
        "beam_width",
        "device",
        "engine_dir",
        "speculative_config",
    ):
        for core in ("trtllm_endpoint", "triton_grpc", "dummy"):
            expected = "line" if (name, core) == ("engine_dir", "triton_grpc") else "error"
            assert run[name][core] == expected, (name, core)
    assert run["trtllm_server_urls"]["torch"] == "error"
    alone = config_of(core_type="triton_grpc", triton_num_frontends_per_model="2")
    named_in_vain = [
        one for one in unused_options(alone, "run") if one.name == "triton_num_frontends_per_model"
    ]
    assert [one.is_error for one in named_in_vain] == [False], "servers that others have started"
    assert made["server_target_qps"]["serve"]["torch"] == "line"
    assert {*run["build_deadline"].values(), *run["server_host"].values()} == {"line"}, (
        "of stages before a run"
    )
    assert made["server_host"]["generate-engines"]["trtllm_endpoint"] == "effect"
    assert {*run["kv_secret"].values()} == {"line"}, "halves of a server have it"
    assert (made["scenarios"]["serve"]["torch"], run["scenarios"]["torch"]) == ("line", "effect")


# Where a core computes, or asks what computes; `roles` and `run` read the rest for all cores.
SOURCES = {
    "dummy": ("cores/dummy*.py",),
    "trtllm_executor": ("trtllm/executor.py", "trtllm/library.py"),
    "trtllm_hlapi": ("trtllm/hlapi.py", "trtllm/library.py"),
}


@pytest.mark.parametrize("core", SOURCES)
def test_a_core_reads_what_is_declared_for_it(core: str) -> None:
    folder = Path(mpillm.__file__).parent
    texts = [path.read_text() for pattern in SOURCES[core] for path in folder.glob(pattern)]
    of = r"(?=\b(?:config|engine|scheduler|scheduling)\.(\w+))"
    read = {name for text in texts for name in re.findall(of, text)}
    flags = {name for text in texts for name in re.findall(r'\bflags(?:\.get\(|\[)"(\w+)"', text)}
    for place in CORE:
        field = place.field
        declared = any(core in use.cores or (not use.cores and not use.needs) for use in field.effect.uses)
        assert declared == (field.name in read | flags), f"{core} and {field.name}"


def on(core: str, *words: str) -> RunConfig:
    return parse_run(["--core_type", core, *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*DUMMY, "--quantization", "int8"], "--quantization int8 has no effect on the dummy core"),
        (["--core_type=torch", "--url", "a:1"], "--trtllm_server_urls a:1 has no effect on the torch core"),
        (
            ["--server_target_qps", "5"],
            "--server_target_qps 5.0 has no effect in scenario Offline (it is for Server)",
        ),
        (
            ["--dataset=prompts", "--num_samples", "5"],
            "--num_samples 5 has no effect without --dataset synthetic",
        ),
        (
            ["--trtllm_build_flags", "gemm_plugin:auto"],
            "command line: trtllm_build_flags gemm_plugin auto has no effect on the torch core; it has",
        ),
        (
            ["--core_type=trtllm_endpoint", "--trtllm_runtime_flags", "max_batchsize:3"],
            "command line: trtllm_runtime_flags max_batchsize 3 has no effect on the trtllm_endpoint core"
            " (did you mean 'max_batch_size'?); it has",
        ),
        (
            ["--core_type=triton_grpc", "--trtllm_runtime_flags", "max_beam_widht:3"],
            "command line: trtllm_runtime_flags max_beam_widht 3 has no effect on the triton_grpc core"
            " (did you mean 'max_beam_width'?)",
        ),
        (
            [
                "--core_type=triton_grpc",
                "--trtllm_runtime_flags",
                "triton_backend:python,cuda_graph_m:true",
            ],
            "command line: trtllm_runtime_flags cuda_graph_m True has no effect on the triton_grpc python",
        ),
        (
            ["--core_type=trtllm_endpoint", "--engine_dir", "x"],
            "--engine_dir x has no effect on the trtllm_endpoint core",
        ),
    ],
)
def test_a_run_does_not_begin_with_what_would_measure_something_else(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(words)
    assert str(error.value).startswith(message)
    assert main(["plan", "--world_size=3", *words]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_change_the_measurement_is_a_line_for_each_reason() -> None:
    flags = "http_backend:openai_async,workers_per_core:4"
    config = on("trtllm_endpoint", "--trtllm_runtime_flags", flags, "--port", "99", "--host", "h")
    assert check_unused(config, RUN) == [
        "no effect on run (it is for serve): --host h, --port 99",
        "no effect here (there is one client): command line: trtllm_runtime_flags http_backend openai_async",
        "no effect here (each worker rank is a client: mpirun -n decides): command line: trtllm_runtime_flags"
        " workers_per_core 4",
    ]
    assert check_unused(on("trtllm_endpoint", "--trtllm_runtime_flags", "workers_per_core:2"), RUN) == []
    assert check_unused(on("torch", "--beam_width", "1"), RUN) == []


def test_answers_of_an_explicit_length_are_not_cut_short_silently() -> None:
    synthetic = (*DUMMY, "--dataset=synthetic")
    with pytest.raises(ConfigError, match=r"--output_mean 500.0 is more than max_output_len 128 \(default\)"):
        parse_run([*synthetic, "--output_mean=500"])
    assert parse_run([*synthetic, "--output_mean=500", "--max_output_len=500"]).output_mean == 500
    short = parse_run([*synthetic, "--max_output_len=4"])
    spec = choose_samples._source(short, Path)
    assert isinstance(spec, Synthetic) and spec.output_mean == 4


def test_ports_of_a_yaml_that_is_made_are_for_a_run_that_makes_one() -> None:
    ports = ("--server_port", "99", "--worker_start_port", "98")
    assert check_unused(on("dummy", *ports), RUN) == [
        "no effect without --mode disaggregated: --server_port 99, --worker_start_port 98"
    ]
    assert check_unused(on("dummy", *ports, "--mode", "disaggregated"), RUN) == []


@pytest.mark.parametrize("core", ["trtllm_endpoint", "trtllm_disagg", "triton_grpc"])
def test_options_of_a_server_that_a_run_does_not_start_are_reported(
    core: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not an error: a stage before the run may have used them."""
    sizes = (
        ("ctx_tp_size", "gen_pp_size")
        if core == "trtllm_disagg"
        else ("tensor_parallelism", "pipeline_parallelism")
    )
    words = [*(f"--{size}=2" for size in sizes), "--max_num_tokens=64"]
    words += ["--enable_kv_cache_reuse=true", "--trtllm_checkpoint_flags=qformat:fp8"]
    (line,) = check_unused(on(core, *words), RUN)
    assert line.startswith(
        "no effect on run (it is for generate-engines and run-llm-server; servers that it does not start have"
        " their own settings): --"
    )
    for word in words[:3]:
        assert word.replace("=", " ") in line
    assert main(["plan", "--world_size=3", f"--core_type={core}", *words]) == 0
    assert "their own settings): --" in " ".join(capsys.readouterr().out.split())
    ours = ["--server", "vllm", "--tensor_parallelism=2", "--max_num_tokens=64"]
    assert check_unused(parse_run(ours), RUN) == []


def test_flags_of_a_server_that_a_run_does_not_start_are_reported() -> None:
    flags = "--trtllm_runtime_flags=num_postprocess_workers:4,max_concurrency:8"
    (line,) = check_unused(on("trtllm_endpoint", flags), RUN)
    assert line.endswith("settings): command line: trtllm_runtime_flags num_postprocess_workers 4")
    triton = "--trtllm_runtime_flags=triton_backend:python,decoupled_mode:true,use_inflight_batching:false"
    (line,) = check_unused(on("triton_grpc", triton), RUN)
    assert "settings): " in line and "decoupled_mode True" in line and "use_inflight_batching False" in line
    assert check_unused(on("triton_grpc", triton), "run-llm-server") == []


def test_limits_of_its_server_have_an_effect_on_a_client() -> None:
    flags = "--trtllm_build_flags=enable_attention_dp:true"
    assert (
        check_unused(on("trtllm_endpoint", flags, "--tensor_parallelism=2", "--max_batch_size=3"), RUN) == []
    )
    (line,) = check_unused(on("trtllm_endpoint", "--trtllm_build_flags=gemm_plugin:auto"), RUN)
    assert "their own settings): --trtllm_build_flags" in line


def test_a_yaml_of_servers_is_theirs(tmp_path: Path) -> None:
    file = tmp_path / "disagg.yaml"
    section = '{"urls": ["a:1"], "tensor_parallel_size": 1, "max_num_tokens": 5, "dtype": "float16"}'
    file.write_text(
        f'{{"perf_metrics_max_requests": 4, "context_servers": {section},'
        f' "generation_servers": {section.replace("a:1", "a:2")}}}'
    )
    assert check_unused(on("trtllm_disagg", "--disagg_config", str(file)).with_yaml(), RUN) == []


@pytest.mark.parametrize(
    ("role", "line"),
    [
        ("leader", ["no effect with --server_role leader: --num_threads 2, --host 0.0.0.0, --port 9111"]),
        ("worker", ["no effect with --server_role worker: --host 0.0.0.0, --port 9111"]),
        ("context", []),
    ],
)
def test_a_leader_and_workers_name_unused_options(
    role: str, line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPILLM_KV_SECRET", "for all servers")
    words = ["--api_key=x", "--host=0.0.0.0", "--num_threads=2", "--port=9111", "--stall_timeout=7"]
    assert unused_in_role(parse_serve([f"--server_role={role}", *words])) == line


def test_started_servers_use_the_secret_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.yaml").write_text("context_servers: {}\ngeneration_servers: {}\n")
    monkeypatch.setenv("MPILLM_KV_SECRET", "for all servers")
    assert check_unused(on("torch", "--disagg_config=d.yaml"), "run-llm-server") == []
    (line,) = check_unused(on("torch"), RUN)
    assert line.startswith("no effect on run (it is for serve): kv_secret")


def test_a_core_of_your_own_may_use_every_option() -> None:
    assert check_unused(on("mine.cores:Core", "--quantization", "int8"), RUN) == []


def test_a_file_may_hold_more_than_a_core_of_the_command_line_uses(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("scenario: Offline\nquantization: int8\nport: 99\n")
    words = ["--config_file", str(file)]
    assert check_unused(on("dummy", *words), RUN) == [
        f"no effect on the dummy core: quantization int8 ({file}:2)"
    ]
    file.write_text("scenario: Offline\nquantization: int8\ncore_type: dummy\n")
    with pytest.raises(ConfigError, match=r"quantization int8 .* has no effect on the dummy core"):
        parse_run(words)
    file.write_text("core_type: dummy\ntrtllm_runtime_flags: {max_num_token: 5}\n")
    with pytest.raises(
        ConfigError, match=r":2: trtllm_runtime_flags max_num_token 5 .*did you mean 'max_num_t"
    ):
        parse_run(words)
    file.write_text("scenario: Offline\ntrtllm_build_flags: {gemm_plugin: auto}\n")
    assert len(check_unused(parse_run(words), RUN)) == 1, "the flags of TensorRT-LLM are for whatever core"


def test_values_of_another_scenario_in_a_file_are_reported(tmp_path: Path) -> None:
    """Submitters copy files between scenarios, and NVIDIA's harness accepts them."""
    file = tmp_path / "mine.yaml"
    file.write_text("scenario: SingleStream\ncore_type: dummy\nserver_target_qps: 9\n")
    (line,) = check_unused(parse_run(["--config_file", str(file)]), RUN)
    assert line == f"no effect in scenario SingleStream (it is for Server): server_target_qps 9.0 ({file}:3)"
    with pytest.raises(ConfigError, match=r"server_target_qps 8\.0 has no effect in scenario SingleStream"):
        parse_run(["--config_file", str(file), "--server_target_qps", "8"])


def test_unused_values_of_a_yaml_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "disagg.yaml"
    file.write_text('{"executors": {"speculative_config": {"decoding_type": "NGram"}, "max_batch_size": 3}}')
    assert check_unused(on("dummy", "--disagg_config", str(file)), RUN) == [
        "no effect on the dummy core: speculative_config decoding_type:NGram"
        f" ({file}: executors.speculative_config)"
    ]


def test_one_string_of_options_serves_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """What a later command uses counts; an option of one of several tests is that test's."""
    words = ["--model_path=tiny-llama", "--max_output_len=3", "--port=99", "--min_duration=3"]
    assert main(["generate-engines", "--dry_run", *words]) == 0
    assert "note" not in capsys.readouterr().err
    assert (
        main(["generate-engines", "--dry_run", *words, "--core_type=torch", "--trtllm_server_urls=a:1"]) == 0
    )
    assert "mpillm: note: no effect on the torch core: --trtllm_server_urls a:1" in capsys.readouterr().err
    several = ["run-harness", *DUMMY, "--dry_run", "--scenarios=Offline,Server", "--server_target_qps=9"]
    assert main(several) == 0
    offline, server = capsys.readouterr().out.splitlines()
    assert "--server_target_qps" not in offline and "--server_target_qps=9" in server
    assert main([*several, "--quantization=int8"]) == 2
    assert "has no effect on the dummy core" in capsys.readouterr().err


def test_serve_reports_options_of_runs() -> None:
    assert check_unused(parse_serve([*DUMMY, "--min_duration", "5"]), "serve") == [
        "no effect on serve (it is for run): --min_duration 5.0"
    ]
