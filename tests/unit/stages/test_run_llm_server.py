"""run-llm-server before it starts anything: what it would start, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpillm.cli import main
from mpillm.options.command_line import Parser
from mpillm.options.fields import FIELDS
from mpillm.options.options import parse
from mpillm.stages.disagg_servers import torch_servers
from tests.helpers.serving_place import make_serving_place
from tests.helpers.support import DONE, USAGE


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two model repositories and a model; PATH has programs that nothing starts."""
    return make_serving_place(tmp_path, "", monkeypatch)


DRY = {
    "triton": (
        [
            "--harness_type=triton",
            "--model_path=llama",
            "--trtllm_build_flags=max_batch_size:8",
            "--scenarios=Server",
        ],
        [
            "# can't run here: --triton_model_repo build/triton_model_repo: there is no"
            " build/triton_model_repo_0; generate-triton-config makes it",
            "# assumed: build/engines/llama-full_prec-tp1-pp1, an engine of tp1-pp1 (from the options)",
            "# assumed: build/triton_model_repo_0, as generate-triton-config writes them",
            "# can't run here: --tritonserver (not given): no such program, in PATH or as"
            " /opt/tritonserver/bin/tritonserver",
            "tritonserver --model-repository=build/triton_model_repo_0 --grpc-port=8001 --http-port=8000"
            " --metrics-port=8002 --http-address=127.0.0.1 --grpc-address=127.0.0.1"
            " --metrics-address=127.0.0.1 --disable-auto-complete-config"
            " --backend-config=python,shm-region-prefix-name=prefix0_0_",
        ],
    ),
    "trtllm_disagg": (
        ["--core_type=trtllm_disagg", "--disagg_config=d.yaml", "--num_gen_servers=2", "--model_path=llama"],
        [
            "# can't run here: --disagg_config d.yaml: no such file; generate-disagg-config writes it",
            "# assumed: d.yaml, the output of generate-disagg-config for 3 workers on this host",
            "trtllm-serve disaggregated -c d.yaml -t 1800 -r 300",
        ],
    ),
    "trtllm_endpoint": (
        ["--core_type=trtllm_endpoint", "--model_path=llama", "--server_host=0.0.0.0"],
        ["trtllm-serve serve llama --host 0.0.0.0 --port 30000"],
    ),
}


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_needs_nothing_of_the_stages_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    from mpillm.trtllm import installed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # where `make triton` puts a tritonserver
    monkeypatch.setattr(installed, "find_program", lambda program, hint: find_nothing(program))
    monkeypatch.delenv("MLPERF_DISAGG_LAUNCH_TYPE", raising=False)
    options, expected = DRY[name]
    assert main(["run-llm-server", *options, "--dry_run"]) == DONE
    out = capsys.readouterr().out
    for line in expected:
        assert f"{line}\n" in out or (line.startswith("trtllm-serve") and line in out)
    assert not list(tmp_path.iterdir())
    if name == "trtllm_disagg":  # under an mpirun of its own
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
        monkeypatch.setenv("MLPERF_DISAGG_LAUNCH_TYPE", "leader")
        assert main(["run-llm-server", *options, "--dry_run"]) == DONE
        assert (
            capsys.readouterr().out.splitlines()[-1] == "trtllm-serve disaggregated -c d.yaml -t 1800 -r 300"
        )


@pytest.mark.parametrize(
    "sections", ["", "context_servers: {urls: ['a:1']}\ngeneration_servers: {urls: ['a:2']}\n"]
)
def test_workers_that_would_register(
    sections: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorRT-LLM's workers under mpirun have no service discovery; its leader has."""
    monkeypatch.chdir(place)
    Path("d.yaml").write_text(
        "disagg_cluster: {cluster_uri: 'http://localhost:8000'}\nport: 8000\n" + sections
    )
    options = ["run-llm-server", "--core_type=trtllm_disagg", "--disagg_config=d.yaml", "--dry_run"]
    assert main(options) == USAGE
    assert (
        "d.yaml: disagg_cluster: trtllm-serve disaggregated_mpi_worker starts no servers that register; name"
        " urls in both sections instead, or start the leader only (MLPERF_DISAGG_LAUNCH_TYPE=leader)"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("MLPERF_DISAGG_LAUNCH_TYPE", "leader")
    assert main(options) == DONE
    assert "trtllm-serve disaggregated -c d.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["WORKER", "Worker", "leader", "LEADER"])
def test_a_launch_type_in_any_case(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.environment import launch_type

    monkeypatch.setenv("MLPERF_DISAGG_LAUNCH_TYPE", given)
    assert launch_type() == given.lower()


@pytest.mark.parametrize(
    ("given", "message"), [("WORKERS", "WORKERS: not worker or leader (did you mean 'worker'?)"), ("", "")]
)
def test_a_launch_type_that_is_none(
    given: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLPERF_DISAGG_LAUNCH_TYPE", given)
    options = [
        "run-llm-server",
        "--core_type=trtllm_disagg",
        "--disagg_config=d.yaml",
        "--num_gen_servers=2",
        "--dry_run",
    ]
    assert main(options) == (USAGE if message else DONE)
    captured = capsys.readouterr()
    assert message in captured.err and ("trtllm-serve" in captured.out) == (not message)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--world_size", "4"],
        ["run-llm-server", "--harness_type=triton", "--triton_model_repo=repo", "--dry_run"],
    ],
)
def test_a_launch_type_without_effect(
    words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("MLPERF_DISAGG_LAUNCH_TYPE", "worker")
    assert main(words) == DONE
    what = "plan" if words[0] == "plan" else "--core_type triton_grpc"
    assert capsys.readouterr().err == (
        f"mpillm: note: the environment variable MLPERF_DISAGG_LAUNCH_TYPE=worker has no effect on {what}:"
        " only run-llm-server reads it, for the servers of a disaggregation YAML\n"
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [("leader", "start one leader alone, or by mpirun -n 1"), ("", "=worker makes each a worker")],
)
def test_several_ranks_that_are_no_workers(
    kind: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("MLPERF_DISAGG_LAUNCH_TYPE", kind)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert (
        main(
            [
                "run-llm-server",
                "--core_type=trtllm_disagg",
                "--disagg_config=d.yaml",
                "--num_gen_servers=2",
                "--dry_run",
            ]
        )
        == USAGE
    )
    assert (
        "Open MPI's mpirun started 3 ranks of run-llm-server: " in (err := capsys.readouterr().err)
        and message in err
    )


def find_nothing(program: str) -> str:
    from launch.command import NotHere

    raise NotHere(f"there is no {program}")


WRONG = {
    "a core without a server": (["--core_type=dummy"], "--core_type dummy needs no server"),
    "no repository": (
        ["--harness_type=triton", "--triton_model_repo=nowhere"],
        "there is no nowhere_0; generate-triton-config makes it",
    ),
    "one port for two": (
        ["--use_triton", "--triton_model_repo=repo", "--triton_server_urls=localhost:1"],
        "names 1 servers on this",
    ),
    "running already": (["--harness_type=triton", "--triton_skip_server_spawn"], "nothing to start"),
    "no YAML for the embedded engine": (["--core_type=torch"], "name --disagg_config, which generate-disagg"),
    "no YAML": (["--core_type=trtllm_disagg"], "needs --trtllm_disagg_config_path"),
    "no model": (["--core_type=trtllm_endpoint"], "needs --model_path"),
    "no checkpoint": (
        ["--core_type=trtllm_endpoint", "--model_path=llama", "--trtllm_checkpoint_flags=qformat:fp8"],
        "--model_path llama, from which generate-engines makes build/checkpoints/llama-fp8-hf: there is"
        " no folder",
    ),
    "no engine": (
        [
            "--core_type=trtllm_endpoint",
            "--model_path=llama",
            "--trtllm_runtime_flags=trtllm_backend:cpp",
            "--engine_dir=nowhere",
        ],
        "--engine_dir nowhere: there is no folder nowhere; generate-engines makes it",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(place)
    options, message = WRONG[name]
    assert main(["run-llm-server", *options]) == USAGE
    assert message in capsys.readouterr().err


# What a YAML has beside its sections, what each section has, the options, and what must be said.
YAMLS: dict[str, tuple[dict[str, object], dict[str, object], list[str], str]] = {
    "no model in the YAML": ({}, {}, ["--model_path=llama"], "d.yaml: there is no model in it, which"
                                                             " trtllm-serve's workers need"),
    "another model": ({"model": "llama"}, {}, ["--model_path=o"], "--model_path o, but d.yaml: model is"
                                                                  " llama, which would be served"),
    "the model before it was quantised": (
        {"model": "llama"}, {}, ["--model_path=llama", "--llm_quantizer_outdir=q"], "--llm_quantizer_outdir"
                                                                                    " q, but d.yaml: model"
                                                                                    " is llama",
    ),
    "another backend": (
        {"model": "llama"}, {}, ["--trtllm_runtime_flags=trtllm_backend:cpp"], "trtllm_backend cpp, but"
                                                                               " d.yaml: backend is pytorch",
    ),
    "another port": ({"model": "llama"}, {}, ["--server_port=9000"], "--server_port 9000, but d.yaml: port"
                                                                     " is 8000"),
    "other workers' ports": (
        {"model": "llama"}, {}, ["--worker_start_port=9000"], "--worker_start_port 9000, but d.yaml: the"
                                                              " first port of urls is 8101",
    ),
    "another limit": (
        {"model": "llama"}, {"max_batch_size": 4}, ["--max_batch_size=8"], "but d.yaml:"
                                                                           " context_servers.max_batch_size"
                                                                           " is 4: leave one",
    ),
    "a limit that the servers are not told": (
        {"model": "llama"}, {}, ["--max_batch_size=8"], "--max_batch_size 8, but there is no"
                                                        " context_servers.max_batch_size in d.yaml",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_that_would_serve_something_else(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(place)
    whole, section, options, message = YAMLS[name]
    sections = {
        f"{kind}_servers": {"urls": [f"localhost:{port}"], **section}
        for kind, port in (("context", 8101), ("generation", 8102))
    }
    (place / "d.yaml").write_text(json.dumps({**whole, **sections}))
    command = ["run-llm-server", "--core_type=trtllm_disagg", "--disagg_config=d.yaml", *options]
    assert main([*command, "--dry_run"]) == main(command) == USAGE
    assert message in capsys.readouterr().err


def test_a_yaml_with_the_values_of_the_options(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A YAML of generate-disagg-config is served with the same options."""
    monkeypatch.chdir(place)
    options = [
        "--core_type=trtllm_disagg",
        "--disagg_config=d.yaml",
        "--model_path=llama",
        "--trtllm_checkpoint_flags=qformat:fp8",
    ]
    options += [
        "--max_batch_size=8",
        "--kv_cache_tokens=640",
        "--traffic_distribution_policy=round_robin",
        "--server_port=8001",
    ]
    options += [
        "--worker_start_port=9000",
        "--trtllm_runtime_flags=batch_scheduler_policy:no_evict",
        "--benchmarks=llama2-70b",
    ]
    options += ["--ctx_tp_size=1", "--enable_kv_cache_reuse"]
    assert main(["generate-disagg-config", *options]) == DONE
    assert main(["run-llm-server", *options, "--dry_run"]) == DONE
    out = capsys.readouterr().out
    assert "disaggregated_mpi_worker -c d.yaml" in out and "trtllm-serve disaggregated -c d.yaml" in out


def test_an_engine_of_several_ranks_is_started_by_mpirun(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    text = 'parameters { key: "gpu_device_ids" value { string_value: "0,1" } }'
    (place / "repo_0/model-0/config.pbtxt").write_text(text)
    assert main(["run-llm-server", "--harness_type=triton", "--triton_model_repo=repo", "--dry_run"]) == DONE
    several, single = capsys.readouterr().out.splitlines()
    first, second = several.split(" : ")
    assert (
        " -n 1 " in first
        and "--grpc-port=8001 --http-port=8000 --metrics-port=8002 --http-address=127.0.0.1" in first
    )
    assert (
        "--model-control-mode=explicit --load-model=model-0" in second
        and "shm-region-prefix-name=prefix0_1_" in second
    )
    assert "--grpc-port=8004 --http-port=8003 --metrics-port=8005" in single and "mpirun" not in single
    (place / "repo_0/model-9").mkdir()
    (place / "repo_0/model-9/config.pbtxt").write_text(text)
    assert main(["run-llm-server", "--harness_type=triton", "--triton_model_repo=repo", "--dry_run"]) == DONE
    assert capsys.readouterr().out.startswith("TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1 ")


@pytest.mark.parametrize(("visible", "shares"), [(None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"])])
def test_each_endpoint_has_its_share_of_the_gpus_that_are_ours(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    visible: str | None,
    shares: list[str],
) -> None:
    from mpillm.devices import Gpu
    from mpillm.trtllm import installed
    from mpillm.trtllm import servers as trtllm_servers

    gpus = tuple(Gpu(f"GPU-{i}", "NVIDIA H200", 141 << 30, 140 << 30) for i in range(4))
    for module in (trtllm_servers, installed):
        monkeypatch.setattr(module, "visible_gpus", lambda: gpus)
    monkeypatch.chdir(place)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (
        main(
            [
                "run-llm-server",
                "--core_type=trtllm_endpoint",
                "--model_path=llama",
                "--tensor_parallelism=2",
                "--dry_run",
            ]
        )
        == DONE
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "trtllm-serve" in line]
    assert [line.partition(" ")[0] for line in lines] == [f"CUDA_VISIBLE_DEVICES={share}" for share in shares]


def test_what_trtllm_serve_reads(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    options = [
        "run-llm-server",
        "--core_type=trtllm_endpoint",
        "--model_path=llama",
        "--engine_dir=engine",
        "--dry_run",
    ]
    assert main([*options, "--enable_kv_cache_reuse"]) == DONE
    out = capsys.readouterr().out
    assert (
        "trtllm-serve serve llama --host" in out
        and "--backend pytorch" in out
        and "enable_block_reuse: true" in out
    )
    assert main([*options, "--trtllm_runtime_flags=trtllm_backend:cpp"]) == DONE
    out = capsys.readouterr().out
    assert "trtllm-serve serve engine --tokenizer llama --host" in out
    assert "--backend tensorrt" in out and "enable_block_reuse: false" in out
    assert main([*options, "--trtllm_runtime_flags=trtllm_backend:c++"]) == USAGE
    assert "trtllm_backend c++: not one of pytorch, cpp" in capsys.readouterr().err


def test_keys_are_not_on_the_servers_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All users of a machine can read command lines."""
    monkeypatch.delenv("MLPERF_DISAGG_LAUNCH_TYPE", raising=False)
    yaml = tmp_path / "d.yaml"
    urls = {"context_servers": "localhost:8001", "generation_servers": "localhost:8002"}
    sections = {name: {"num_instances": 1, "urls": [url]} for name, url in urls.items()}
    yaml.write_text(json.dumps(sections))
    options = [
        "--core_type=torch",
        f"--disagg_config={yaml}",
        "--api_key",
        "key of clients",
        "--kv_secret=of caches",
    ]
    servers = torch_servers(parse(options, Parser(prog="mpillm test"), FIELDS), options)
    assert [server.name for server in servers] == ["workers", "disaggregated leader"]
    for server in servers:
        assert (
            "key of clients" not in server.command.argv and "--kv_secret=of caches" not in server.command.argv
        )
        assert server.command.env == {"MPILLM_API_KEY": "key of clients", "MPILLM_KV_SECRET": "of caches"}
