"""generate-disagg-config: what is written for the workers of an mpirun, and alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.options.command_line import Parser
from mpillm.options.fields import FIELDS
from mpillm.options.options import parse
from mpillm.options.run_config import RunConfig
from mpillm.stages.disagg_workers import for_workers


def config(*options: str) -> RunConfig:
    return parse(["--core_type=trtllm_disagg", *options], Parser(prog="mpillm test"), FIELDS)


def test_each_instance_is_where_its_first_rank_is() -> None:
    made = for_workers(
        config("--ctx_tp_size=2", "--gen_tp_size=4", "--num_gen_servers=1"), ["a"] * 4 + ["b"] * 4
    )
    sections = dict(made.sections)
    assert sections["context_servers"].urls == ("a:8001", "a:8002") and sections[
        "generation_servers"
    ].urls == ("b:8003",)
    assert (made.hostname, made.port, made.n_workers) == ("a", 8000, 8)
    assert disagg.parse(disagg.dump(made)) == made


def test_ports() -> None:
    made = for_workers(config("--server_port=30000", "--worker_start_port=8336"), ["localhost"] * 3)
    assert made.port == 30000 and [url for _, server in made.sections for url in server.urls] == [
        f"localhost:{8336 + i}" for i in range(3)
    ]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run outside any mpirun, in a folder of its own."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


DISAGG = ["--core_type=trtllm_disagg", "--model_path=llama"]


@pytest.mark.parametrize("options", [DISAGG, ["--mode=disaggregated", "--core_type=dummy"]])
def test_ports_without_an_mpirun(alone: None, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert (
        main(
            [
                "generate-disagg-config",
                *options,
                "--server_port=8001",
                "--worker_start_port=9000",
                "--output=d.yaml",
            ]
        )
        == 0
    )
    made = disagg.load("d.yaml")
    assert (made.port, [url for _, server in made.sections for url in server.urls]) == (
        8001,
        ["localhost:9000", "localhost:9001"],
    )
    assert main(["plan", "--disagg_config=d.yaml"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--server_port=8001"],
            [
                "hostname and port has the same address",
                "--server_port 8001",
                "worker_start_port 8001 (default)",
            ],
        ),
        (
            ["--worker_start_port=7999"],
            [
                "hostname and port has the same address",
                "server_port 8000 (default)",
                "--worker_start_port 7999",
            ],
        ),
        (["--worker_start_port=65535"], ["'localhost:65536'", "--worker_start_port 65535"]),
    ],
)
def test_ports_that_can_not_be_are_refused_before_anything_is_written(
    alone: None, capsys: pytest.CaptureFixture[str], options: list[str], expected: list[str]
) -> None:
    """The message is the same alone and under mpirun; `plan` would refuse the file."""
    assert main(["generate-disagg-config", *DISAGG, *options, "--output=d.yaml"]) == 2
    message = capsys.readouterr().err
    with pytest.raises(ConfigError) as under_mpirun:
        for_workers(config(*options), ["localhost"] * 2)
    for text in (message, str(under_mpirun.value)):
        assert all(word in text for word in expected)
    assert not Path("d.yaml").exists()


FP8 = "--trtllm_checkpoint_flags=qformat:fp8,kv_cache_dtype:fp8"
CPP = "--trtllm_runtime_flags=trtllm_backend:cpp"


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ([], "llama"),
        (["--llm_quantizer_outdir=quantised"], "quantised"),
        ([FP8], "build/checkpoints/llama-fp8-hf"),
        ([FP8, "--llm_quantizer_outdir=quantised"], "quantised"),
        (["--trtllm_checkpoint_flags=qformat:full_prec"], "llama"),
        ([CPP, "--engine_dir=engine"], "engine"),
        ([CPP], "build/engines/llama-full_prec-tp1-pp1"),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_the_model_is_what_generate_engines_makes(
    alone: None, capsys: pytest.CaptureFixture[str], options: list[str], model: str, there: bool
) -> None:
    """The YAML names the made model even if it is not there yet, never the model that it is made of."""
    if there:
        Path(model).mkdir(parents=True)
    assert main(["generate-disagg-config", *DISAGG, *options]) == 0
    captured = capsys.readouterr()
    assert disagg.parse(captured.out).model == model
    assert (f"there is no folder {model} yet; generate-engines makes it" in captured.err) == (
        not there and model != "llama"
    )


def test_a_server_without_a_model_is_refused(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate-disagg-config", "--core_type=trtllm_disagg", "--output=d.yaml"]) == 2
    assert (
        "--core_type trtllm_disagg needs --model_path, or the --llm_quantizer_outdir"
        in capsys.readouterr().err
    )
    assert not Path("d.yaml").exists()
    assert main(["generate-disagg-config", "--core_type=trtllm_disagg", "--benchmarks=llama2-70b"]) == 0
    assert disagg.parse(capsys.readouterr().out).model == "build/models/Llama-2-70b-chat-hf"


def test_what_the_tensorrt_backend_refuses_is_not_written(
    alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine sets kv_cache_config.dtype, and only the PyTorch backend has disable_overlap_scheduler."""
    assert main(["generate-disagg-config", *DISAGG, CPP, FP8, "--engine_dir=engine"]) == 0
    made = disagg.parse(capsys.readouterr().out)
    assert made.backend == "tensorrt"
    for _, server in made.sections:
        assert "dtype" not in server.kv_cache_config and "disable_overlap_scheduler" not in server.extra
        assert server.extra["tokenizer"] == "llama"
    assert main(["generate-disagg-config", *DISAGG, FP8]) == 0
    made = disagg.parse(capsys.readouterr().out)
    assert made.backend == "pytorch" and [server.kv_cache_config["dtype"] for _, server in made.sections] == [
        "fp8",
        "fp8",
    ]
    assert (
        made.context_servers is not None and made.context_servers.extra["disable_overlap_scheduler"] is True
    )


def test_every_option_that_has_a_place_in_the_file_gets_there(
    alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--max_batch_size=5",
        "--kv_cache_tokens=640",
        "--tokens_per_block=16",
        "--beam_width=2",
        "--load_format=dummy",
    ]
    for core in (DISAGG, ["--mode=disaggregated", "--core_type=dummy"]):
        assert main(["generate-disagg-config", *core, *options]) == 0
        for _, server in disagg.parse(capsys.readouterr().out).sections:
            assert (server.max_batch_size, server.extra["max_beam_width"], server.extra["load_format"]) == (
                5,
                2,
                "dummy",
            )
            assert (server.kv_cache_config["max_tokens"], server.kv_cache_config["tokens_per_block"]) == (
                640,
                16,
            )


def test_as_many_ranks_as_the_options_make() -> None:
    with pytest.raises(ConfigError, match=r"world size: 3; .* must be 4 \(all ranks are workers\)"):
        for_workers(config("--ctx_tp_size=2", "--gen_tp_size=2"), ["a"] * 3)
    with pytest.raises(
        ConfigError,
        match="3; 1 context instance of 2 ranks and 2 generation instances of 2 ranks need 6 worker ranks",
    ):
        for_workers(
            config("--num_ctx_servers=1", "--ctx_tp_size=2", "--num_gen_servers=2", "--gen_tp_size=2"),
            ["a"] * 3,
        )
    with pytest.raises(ConfigError, match="--mode aggregated: trtllm-serve's workers are disaggregated"):
        for_workers(parse([], Parser(prog="mpillm test"), FIELDS), ["a"] * 3)


def test_the_file_that_is_named_is_written_and_not_read(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "disagg.yaml"
    options = ("--core_type=trtllm_disagg", "--model_path=llama", f"--trtllm_disagg_config_path={path}")
    assert main(["generate-disagg-config", *options, "--world_size=4"]) == 0
    assert disagg.load(str(path)).n_workers == 3
    path.write_text("not: a configuration")
    assert main(["generate-disagg-config", *options, "--world_size=5", "--dry_run"]) == 0
    assert "num_instances" in capsys.readouterr().out and path.read_text() == "not: a configuration"
    assert main(["generate-disagg-config", *options, "--world_size=5"]) == 0
    assert disagg.load(str(path)).n_workers == 4
    assert [p.name for p in path.parent.iterdir()] == ["disagg.yaml"]


def test_tensorrt_llms_servers_get_the_harness_flags(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--trtllm_runtime_flags=kvcache_free_gpu_mem_frac:0.6,batch_scheduler_policy:no_evict"
    flags += ",enable_chunked_context:true"
    options = ["generate-disagg-config", "--world_size=5", "--model_path=llama", flags]
    assert main([*options, "--core_type=trtllm_disagg", "--trtllm_checkpoint_flags=kv_cache_dtype:fp8"]) == 0
    for _, server in disagg.parse(capsys.readouterr().out).sections:
        assert server.kv_cache_config == {
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": 0.6,
            "dtype": "fp8",
        }
        assert server.extra["enable_chunked_prefill"] is True
        policies = {
            "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
            "context_chunking_policy": "FIRST_COME_FIRST_SERVED",
        }
        assert server.extra["scheduler_config"] == policies
    assert main([*options, "--mode=disaggregated", "--core_type=dummy"]) == 0
    # only explicit values: `run` has the defaults itself
    for _, server in disagg.parse(capsys.readouterr().out).sections:
        assert server.kv_cache_config == {"free_gpu_memory_fraction": 0.6}
        assert server.extra["scheduler_config"] == {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}


def test_a_file_that_can_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert (
        main(
            [
                "generate-disagg-config",
                "--mode=disaggregated",
                "--world_size=5",
                f"--output={tmp_path}/file/x.yaml",
            ]
        )
        == 2
    )
    assert "--output" in (err := capsys.readouterr().err) and "can't be written" in err
