"""generate-disagg-config: what is written for the workers of an mpirun, and alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import disagg
from disagg.errors import ConfigError
from launch.environment import launched_size
from mpillm.builder.disagg_config import for_workers
from mpillm.cli import main
from mpillm.command_line import Parser
from mpillm.config import RunConfig, parse
from mpillm.fields import FIELDS


def config(*options: str) -> RunConfig:
    return parse(["--core_type=trtllm_disagg", *options], Parser(prog="mpillm test"), FIELDS)


def test_each_instance_is_where_its_first_rank_is() -> None:
    made = for_workers(config("--ctx_tp_size=2", "--gen_tp_size=4", "--num_gen_servers=1"), ["a"] * 4 + ["b"] * 4)
    sections = dict(made.sections)
    assert sections["context_servers"].urls == ("a:8001", "a:8002") and sections["generation_servers"].urls == ("b:8003",)
    assert (made.hostname, made.port, made.n_workers) == ("a", 8000, 8)
    assert disagg.parse(disagg.dump(made)) == made


def test_ports() -> None:
    made = for_workers(config("--server_port=30000", "--worker_start_port=8336"), ["localhost"] * 3)
    assert made.port == 30000 and [url for _, server in made.sections for url in server.urls] == [f"localhost:{8336 + i}" for i in range(3)]
    with pytest.raises(ConfigError, match="an address of its own; it is that of hostname and port"):
        for_workers(config("--server_port=8001"), ["localhost"] * 3)


def test_as_many_ranks_as_the_options_make() -> None:
    with pytest.raises(ConfigError, match="mpirun -n 3: the options make instances of 4 ranks together"):
        for_workers(config("--ctx_tp_size=2", "--gen_tp_size=2"), ["a"] * 3)
    with pytest.raises(ConfigError, match=r"world size: 5; disaggregated instances of 1 x 2 and 2 x 2 ranks need 6 worker ranks"):
        for_workers(config("--num_ctx_servers=1", "--ctx_tp_size=2", "--num_gen_servers=2", "--gen_tp_size=2"), ["a"] * 3)
    with pytest.raises(ConfigError, match="--mode aggregated: trtllm-serve's workers are disaggregated"):
        for_workers(parse([], Parser(prog="mpillm test"), FIELDS), ["a"] * 3)


def test_the_file_that_is_named_is_written_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "new" / "disagg.yaml"
    options = ("--core_type=trtllm_disagg", f"--trtllm_disagg_config_path={path}")
    assert main(["generate-disagg-config", *options, "--world_size=5"]) == 0
    assert disagg.load(str(path)).n_workers == 3
    path.write_text("not: a configuration")
    assert main(["generate-disagg-config", *options, "--world_size=6", "--dry_run"]) == 0
    assert "num_instances" in capsys.readouterr().out and path.read_text() == "not: a configuration"
    assert main(["generate-disagg-config", *options, "--world_size=6"]) == 0
    assert disagg.load(str(path)).n_workers == 4
    assert [p.name for p in path.parent.iterdir()] == ["disagg.yaml"]


def test_tensorrt_llms_servers_are_told_the_harness_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    flags = "--trtllm_runtime_flags=kvcache_free_gpu_mem_frac:0.6,batch_scheduler_policy:no_evict,enable_chunked_context:true"
    options = ["generate-disagg-config", "--world_size=5", flags]
    assert main([*options, "--core_type=trtllm_disagg", "--trtllm_checkpoint_flags=kv_cache_dtype:fp8"]) == 0
    for _, server in disagg.parse(capsys.readouterr().out).sections:
        assert server.kv_cache_config == {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.6, "dtype": "fp8"}
        assert server.extra["enable_chunked_prefill"] is True
        policies = {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "context_chunking_policy": "FIRST_COME_FIRST_SERVED"}
        assert server.extra["scheduler_config"] == policies
    assert main([*options, "--mode=disaggregated", "--core_type=dummy"]) == 0
    assert all(not server.kv_cache_config for _, server in disagg.parse(capsys.readouterr().out).sections)


def test_a_file_that_can_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["generate-disagg-config", "--mode=disaggregated", "--world_size=5", f"--output={tmp_path}/file/x.yaml"]) == 2
    assert "--output" in (err := capsys.readouterr().err) and "can't be written" in err


def test_what_says_that_a_process_is_one_of_many() -> None:
    assert launched_size({}) is None
    assert launched_size({"OMPI_COMM_WORLD_SIZE": "4"}) == launched_size({"PMI_SIZE": "4"}) == 4
    assert launched_size({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}) == 8
    assert launched_size({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # a batch script, before any srun
