"""What says how to run: the disaggregation YAML, configuration files, user.conf, launchers' variables."""

from __future__ import annotations

import contextlib
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

import disagg
from disagg import ConfigError
from launch import follow_job
from launch.children import tail
from launch.find_mpirun import choose
from launch.launcher import find_launcher, refuse_copies
from launch.launcher_monitor import LauncherMonitor
from launch.mpirun import slots
from launch.mpirun_args import spans_hosts
from launch.rank_registry import RankRegistry
from mpillm.doctor import cluster_report, gpus
from mpillm.experiments.option_grid import grid_of_yaml, grid_points
from mpillm.loadgen.settings import LoadGenConfig, load_settings
from mpillm.options import published_yaml
from mpillm.options.command_line import Parser
from mpillm.options.fields import BY_NAME, FIELDS
from mpillm.options.options import parse
from tests.helpers.fuzzing import ODD_NUMBER, ODD_TEXT, ODD_VALUE, changed, damaged, fuzz

YAML = [
    {
        "hostname": "h0",
        "port": 8000,
        "model": "m",
        "backend": "pytorch",
        "context_servers": {
            "num_instances": 2,
            "tensor_parallel_size": 2,
            "moe_expert_parallel_size": 1,
            "urls": ["h0:8001", "h1:8001"],
            "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "tokens_per_block": 32},
            "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 100},
            "router": {"type": "Round_Robin"},
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        },
        "generation_servers": {"num_instances": 1, "pipeline_parallel_size": 2, "max_batch_size": 64},
    },
    {
        "executors": {"num_instances": 3, "max_seq_len": 100, "lora_config": {"a": [1, None]}},
        "max_retries": 1,
    },
    {"disagg_cluster": {"uri": "http://a"}, "generation_servers": {"num_instances": 0}},
]
TEXTS = [yaml.safe_dump(one).encode() for one in YAML]
WORDS = [
    b"<<: *a\n",
    b"&a ",
    b"*a",
    b"!!int x",
    b"!!python/object:x ",
    b"? ",
    b"2024-99-99",
    b"0x",
    b"---\n",
    b"{",
    b"\t",
    b"~",
]


def yaml_text(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


def _read_disagg(folder: Path, text: bytes) -> None:
    (file := folder / "disagg.yaml").write_bytes(text)
    config = disagg.load(str(file))
    assert disagg.parse(disagg.dump(config)) == config
    if config.n_workers < 1000:
        disagg.plan(config, config.n_workers + 1)


@pytest.mark.long
@fuzz(changed(YAML).map(yaml_text) | damaged(TEXTS, WORDS), refused_by=ConfigError)
def test_disaggregation_yaml(folder: Path, text: bytes) -> None:
    _read_disagg(folder, text)


@pytest.mark.long
@fuzz(
    changed(YAML).map(yaml_text) | damaged(TEXTS, WORDS),
    st.sampled_from(["dummy", "trtllm_disagg"]),
    refused_by=ConfigError,
)
def test_options_of_a_disaggregation_yaml(folder: Path, text: bytes, core: str) -> None:
    """The values that it gives a run's options, and those of each section."""
    (file := folder / "disagg.yaml").write_bytes(text)
    words = ["--core_type", core, "--disagg_config", str(file)]
    config = parse(words, Parser(prog="mpillm x"), FIELDS).with_yaml()
    for one in (config, *config.sections.values()):
        one.to_json()


_LLM_ARGS = {"tensor_parallel_size": 2, "kv_cache_config": {"dtype": "fp8"}, "max_batch_size": 4}
_FLAGS = {"tp-size": 2, "dp-size": 2, "max-num-seqs": 8, "chunked-prefill-size": -1, "kv-cache-dtype": "fp8"}
_FILE = {"config": "/a/none.yaml", "gpus_per_worker": 2}
_CONTAINER = {
    "name": "main",
    "command": ["/bin/sh", "-c"],
    "args": ["exec python3 -m dynamo.trtllm --model-path $M --extra-engine-args /c/a.yaml 2>&1 | tee log"],
    "env": [{"name": "M", "value": "a/b"}],
    "volumeMounts": [{"name": "v", "mountPath": "/c"}],
    "resources": {"limits": {"nvidia.com/gpu": "2"}},
}
_POD = {"spec": {"containers": [_CONTAINER], "volumes": [{"name": "v", "configMap": {"name": "m"}}]}}
_MAP = {"kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"a.yaml": "tensor_parallel_size: 2\n"}}
_ARGS = ["--model-path", "a/b", "--tp", "2", "--config", "/c/a.yaml"]
_PREFILL = {"mainContainer": {"command": ["python3", "-m", "dynamo.sglang"], "args": _ARGS}}
_GRAPH = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "other documents": [_MAP]}
RECIPES = [
    {
        **_GRAPH,
        "spec": {
            "components": [
                {"name": "f", "type": "frontend", "podTemplate": {"spec": {"containers": []}}},
                {"name": "w", "type": "worker", "multinode": {"nodeCount": 2}, "podTemplate": _POD},
            ]
        },
    },
    {**_GRAPH, "spec": {"env": [], "services": {"P": {"replicas": 2, "extraPodSpec": _PREFILL}}}},
    {
        "hardware": {"num_ctx_servers": 2, "num_gen_servers": 1},
        "environment": {"model_path": "<model>"},
        "worker_config": {"ctx": _LLM_ARGS, "gen": _LLM_ARGS},
    },
    {
        "model": {"path": "hf:a/b"},
        "resources": {"prefill_workers": 1, "decode_workers": 2, "gpus_per_decode": 4},
        "backend": {"type": "sglang", "sglang_config": {"prefill": _FLAGS, "decode": _FLAGS}},
    },
    {
        "schema": 2,
        "engine": {"type": "vllm"},
        "roles": {"agg": {"workers": 2, "gpus": 4, "critical": True, "restart": {"max": 2}, "args": _FLAGS}},
        "frontend": {"args": {"router-mode": "kv"}, "ctx_router": {"type": "conversation"}},
    },
    {"base": {"resources": {}}, "zip_override_a": {}},
    {
        "modelArtifacts": {"uri": "hf://a/b"},
        "prefill": {
            "replicas": 1,
            "parallelism": {"tensor": 2},
            "extra-args": "--max-num-seqs 8 'a b' --x=.5",
        },
        "decode": {"replicas": 2, "containers": [{"args": ["--tensor-parallel-size", "2", 3]}]},
    },
    {"disagg_cluster": {"num_prefill_workers": 1}, "prefill": _FILE, "decode": _FILE},
    {"variables": {"NUM_CTX_SERVERS": {"value": 1}, "TRTLLM_YAML_CTX": {"value": "a.yaml"}}},
    {"apiVersion": "v1", "kind": "Deployment"},
    {"UCX_TLS": "rc"},
    _LLM_ARGS,
]


@pytest.mark.long
@fuzz(
    changed(RECIPES).map(yaml_text) | damaged([yaml_text(one) for one in RECIPES], WORDS),
    refused_by=ConfigError,
)
def test_published_yaml(folder: Path, text: bytes) -> None:
    (file := folder / "recipe.yaml").write_bytes(text)
    config, form, lines = published_yaml.load(str(file))
    assert disagg.parse(disagg.dump(config)) == config and bool(form) == bool(lines)


GRID = {"max_batch_size": [1, 2], "trtllm_runtime_flags": [{"max_num_tokens": 64}], "mode": "aggregated"}


@fuzz(
    changed([GRID]).map(yaml_text) | damaged([yaml_text(GRID)], WORDS),
    refused_by=ConfigError,
)
def test_grid_of_a_sweep(folder: Path, text: bytes) -> None:
    (file := folder / "grid.yaml").write_bytes(text)
    for point in itertools.islice(grid_points(grid_of_yaml(file)), 20):
        assert len(point.folder) < 200


OPTIONS = [
    {
        "benchmark": "llama2-70b",
        "scenario": "Server",
        "server_target_qps": 3.5,
        "min_duration": "10s",
        "tensor_parallelism": 2,
        "trtllm_runtime_flags": {"max_batch_size": 48, "enable_chunked_context": True},
        "goodput": "ttft:100 tpot:20",
    },
    [
        {"name": "a", "benchmarks": "mixtral-8x7b", "dataset": "synthetic", "input_mean": 9},
        {"core_type": "dummy"},
    ],
]


def _read_options(file: Path) -> None:
    config = parse(["--config_file", str(file)], Parser(prog="mpillm x"), FIELDS)
    config.to_json()


@fuzz(
    changed(OPTIONS).map(yaml_text) | damaged([yaml_text(one) for one in OPTIONS], WORDS),
    refused_by=ConfigError,
    found=[(b"goodput:\n  ttft: 1" + b"0" * 400,)],
)
def test_configuration_file_in_yaml(folder: Path, text: bytes) -> None:
    (file := folder / "options.yaml").write_bytes(text)
    _read_options(file)


NAMES = sorted(BY_NAME)
# Values by field; the text of the file is ours, since it is a program, which may do anything.
VALUES = st.dictionaries(
    st.sampled_from(["gpu_batch_size", "precision", "min_duration", "trtllm_build_flags", *NAMES]),
    ODD_VALUE | st.sampled_from(["{'llama2-70b': 96}", "object()", "lambda: 1", "{1, 2}", "b'x'"]),
    max_size=4,
)
FORMS = ["exports", "class", "odd"]


def _program(values: dict[str, Any], form: str) -> str:
    if form == "class":
        head = "from mpillm.user_config import *\n@ConfigRegistry.register(HarnessType.Custom)\n"
        body = [f"    {name} = {value!r}" for name, value in values.items()]
        return "\n".join([f"{head}class A(ServerGPUBaseConfig):", "    benchmark = 'llama2-70b'", *body, ""])
    head = "import code.common.constants as C\nimport code.fields.harness as h\nnan = inf = float('nan')\n"
    pairs = ", ".join(f"getattr(h, {name!r}): {value!r}" for name, value in values.items())
    exported = repr(values) if form == "odd" else "{C.WorkloadSetting(): {" + pairs + "}}"
    return f"{head}EXPORTS = {exported}\n"


@pytest.mark.long
@fuzz(
    VALUES,
    st.sampled_from(FORMS),
    refused_by=ConfigError,
    found=[
        ({"min_duration": 10**400}, "exports"),
        ({"min_duration": "1.2.3"}, "exports"),
        ({"llm_gen_config_path": "\ud800"}, "exports"),
        ({"model_path": "A" * 300}, "exports"),
        *(
            ({name: [{"A" * 15_000: "A" * 15_000}]}, "exports")
            for name in ("ctx_tp_size", "audit_conf", "apply_chat_template", "precision", "gpu_batch_size")
        ),
    ],
)
def test_configuration_file_in_python(folder: Path, values: dict[str, Any], form: str) -> None:
    place = folder / "configs" / "S" / "Offline"
    place.mkdir(parents=True, exist_ok=True)
    (file := place / "llama2-70b.py").write_text(
        _program(values, form), encoding="utf-8", errors="backslashreplace"
    )
    _read_options(file)


CONF = [b"*.Server.target_qps = 5\nllama2-70b.*.min_duration = 600\n# x\n*.Offline.min_query_count = 0x10\n"]


@fuzz(
    damaged(
        CONF, [b"*.*.", b" = ", b"1e400", b"99999999999999999", b"ttft_latency", b"mode = 2\n", b"nan", b"."]
    ),
    st.sampled_from(["Server", "Offline", "SingleStream"]),
    refused_by=ConfigError,
)
def test_user_conf(folder: Path, text: bytes, scenario: str) -> None:
    (file := folder / "user.conf").write_bytes(text)
    load_settings(LoadGenConfig(scenario, "PerformanceOnly", user_conf=str(file)), 100).to_json()


VARIABLES = [
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "PMIX_NAMESPACE"),
    *(
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_STEP_ID",
    ),
    *("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "PBS_NODEFILE", "LSB_HOSTS", "PALS_RANKID", "MPI_LOCALNRANKS"),
]
SETTINGS = (
    ODD_TEXT.map(lambda text: text.replace("\0", ""))
    | ODD_NUMBER.map(str)
    | st.sampled_from(["²", "٣", "0", "1", "2"])
)


@fuzz(
    st.dictionaries(st.sampled_from(VARIABLES), SETTINGS, max_size=6),
    refused_by=ConfigError,
    found=[(dict.fromkeys(VARIABLES, "0" * 5000),)],
)
def test_variables_of_launchers(_: Path, env: dict[str, str]) -> None:
    find_launcher(env)
    spans_hosts((), env)
    slots(env)
    with contextlib.suppress(ConfigError):
        refuse_copies("run", env)


JOB = b"JobId=7 JobName=a b JobState=COMPLETED ExitCode=0:9 NodeList=n[1-2] StdOut=/dev/null Comment=x=y"


@fuzz(damaged([JOB], [b"ExitCode=", b"JobState=", b"\xc2\xb2:0", b":", b"="]), refused_by=ConfigError)
def test_output_of_slurm_about_a_job(_: Path, output: bytes) -> None:
    code = follow_job._exit_code(follow_job._read_job(output.decode(errors="replace")))
    assert 0 <= code < 1200


@fuzz(damaged([b"a:4,b:8,c"], [b":", b",", b"9999999", b"\xc2\xb2"]), refused_by=ConfigError)
def test_lists_of_hosts(_: Path, data: bytes) -> None:
    assert disagg.parse_nodes(data.decode(errors="replace"))


PRINTED = [
    b"mpirun (Open MPI) 4.1.6\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
    b"HYDRA build details:\n    Version:                                 4.3.0\n",
    b"0, NVIDIA H200, 570.1, 143771, 0, Disabled, 0\n1, NVIDIA H200, 570.1, 143771, 5, [N/A], [N/A]\n",
    b"\tGPU0\tGPU1\tNIC0\n\x1b[4mGPU0\t X \tNV18\tSYS\nGPU1\tNV18\t X \tSYS\n",
    b"mpillm 1.0 doctor: h1\n  FAILURE  memory  no\n  WARNING  a  b\n",
    b"ORTE has lost communication with a remote daemon.\n  Remote daemon: [a] on node h2\n"
    b"  Daemon exit status: 137\n\x1b_mpillm-here:3 h2\x1b\nmpillm: a\n",
]


@fuzz(
    damaged(
        PRINTED, [b"GPU", b"[N/A]", b",", b"9" * 5000, b"\xc2\xb2", b"Version: ", b"(Open MPI) ", b"\x1b[4m"]
    ),
    examples=120,
    found=[
        (b"GPU%b X a\n" % (b"9" * 5000),),
        (b"GPU0 X\nGPU1 X\n",),
        (b"mpirun (Open MPI) %b" % (b"4" * 5000),),
    ],
)
def test_output_of_programs(folder: Path, data: bytes) -> None:
    """mpirun, nvidia-smi, doctor on another node, a server's log; ranks, through mpirun."""
    text = data.decode(errors="replace")
    (log := folder / "log").write_bytes(data)
    assert len(tail(log, 15).splitlines()) <= 15 * 3
    cluster_report._judge_doctor(0, log)
    gpus.parse_matrix(text)
    monitor = LauncherMonitor(calls())
    for line in text.splitlines():
        monitor.read_line(line)
    calls().absent()
    with contextlib.suppress(ConfigError):
        choose([("mpirun", text)], "Open MPI v4.1.6")
    with contextlib.suppress(ValueError):  # the caller reports it
        gpus.parse_devices(text)


@cache
def calls() -> RankRegistry:
    return RankRegistry(4)
