"""Deploy files of Dynamo: workers become instances, by their command lines; the rest is named or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg import DisaggConfig
from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.options.published_yaml import load

HEAD = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": {"name": "g"}}
FRONTEND: dict[str, Any] = {
    "name": "Frontend",
    "type": "frontend",
    "podTemplate": {
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "command": ["python3", "-m", "dynamo.frontend"],
                    "args": ["--router-mode", "kv"],
                }
            ]
        }
    },
}


def worker(*args: Any, command: Any = ("python3", "-m", "dynamo.vllm"), **fields: Any) -> dict[str, Any]:
    """Return a component of v1beta1; `fields` of its container begin with an underscore."""
    container = {"name": "main", "command": list(command), "args": list(args)}
    container |= {name[1:]: fields.pop(name) for name in list(fields) if name.startswith("_")}
    pod = {"containers": [container], **fields.pop("pod", {})}
    return {"name": "w", "type": "worker", "podTemplate": {"spec": pod}, **fields}


def script(text: str, **fields: Any) -> dict[str, Any]:
    return worker(text, command=("/bin/bash", "-lc"), **fields)


def read(folder: Path, *components: Any, others: tuple[Any, ...] = ()) -> tuple[DisaggConfig, list[str]]:
    file = folder / "deploy.yaml"
    graph = {**HEAD, "spec": {"components": list(components)}}
    file.write_text(yaml.safe_dump_all([*others, graph]))
    config, form, lines = load(str(file))
    assert form == "a deploy file of Dynamo"
    return config, [" ".join(line.split()) for line in lines]


def sizes(config: DisaggConfig) -> list[tuple[str, int, int]]:
    return [(name, one.num_instances, one.ranks_per_instance) for name, one in config.sections]


def test_prefill_and_decode_workers(tmp_path: Path) -> None:
    args = ("--model", "org/model", "--tensor-parallel-size", "2", "--max-num-seqs=8")
    prefill = worker(*args, "--disaggregation-mode", "prefill", name="p", replicas=3, sharedMemorySize="1Gi")
    decode = worker(*args, "--data-parallel-size", "4", "--enable-expert-parallel", name="d", type="decode")
    config, lines = read(tmp_path, FRONTEND, prefill, decode)
    assert config.model == "org/model"
    assert sizes(config) == [("context_servers", 3, 2), ("generation_servers", 1, 8)]
    (_, context), (_, generation) = config.sections
    assert context.router == {"type": "kv_cache_aware"} and not generation.router
    assert (context.max_batch_size, generation.moe_expert_parallel_size) == (8, 8)
    assert lines[1:] == [
        "its workers run dynamo.vllm",
        "components: not used here: Frontend",
        "the workers' pods: not used here: sharedMemorySize",
    ]
    assert main(["plan", "--disagg_config", str(tmp_path / "deploy.yaml")]) == 0


def test_without_prefill_workers_the_others_compute_both_phases(tmp_path: Path) -> None:
    config, _ = read(tmp_path, FRONTEND, worker("--model", "org/model", type="decode", replicas=2))
    ((name, section),) = config.sections
    assert (name, section.num_instances, section.router) == ("executors", 2, {"type": "kv_cache_aware"})


@pytest.mark.parametrize(
    ("n_nodes", "line"), [(2, ""), (1, "components.w: 8 GPUs; by its sizes, it has 16 ranks")]
)
def test_nodes_and_gpus_of_a_worker(tmp_path: Path, n_nodes: int, line: str) -> None:
    resources = {"limits": {"nvidia.com/gpu": "8", "memory": "1Gi"}, "requests": {"cpu": 1}}
    one = worker("--model", "a/b", "-tp", 16, multinode={"nodeCount": n_nodes}, _resources=resources)
    config, lines = read(tmp_path, one)
    assert sizes(config) == [("executors", 1, 16)]
    assert "the workers' pods: not used here: requests, memory" in lines
    assert [text for text in lines if "GPUs" in text] == ([line] if line else [])


SCRIPT = """# a comment that isn't quoted
set -e
ulimit -n 1024 && exec python3 -m dynamo.vllm \\
  --model "${MODEL}" --max-model-len=${LEN:-4096} \\
  --kv-transfer-config '{"kv_connector": "NixlConnector | x"}' \\
  --tensor-parallel-size $TP 2>&1 | tee --no-enable-prefix-caching log
"""


def test_a_script_of_a_shell(tmp_path: Path) -> None:
    env = [
        {"name": name, "value": value} for name, value in (("MODEL", "a/b"), ("TP", "4"), ("UCX_TLS", "rc"))
    ]
    config, lines = read(tmp_path, script(SCRIPT, _env=env))
    ((_, section),) = config.sections
    assert (config.model, section.tensor_parallel_size, section.max_seq_len) == ("a/b", 4, 4096)
    assert section.kv_cache_config == {}, "what follows the pipe belongs to tee"
    assert lines[2:] == [
        "the workers' environment variables: not used here: UCX_TLS",
        "the workers' arguments: not used here: kv-transfer-config",
    ]


def config_map(name: str, **files: Any) -> dict[str, Any]:
    data = {f"{file}.yaml": yaml.safe_dump(content) for file, content in files.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def mounted(name: str) -> dict[str, Any]:
    return {
        "pod": {"volumes": [{"name": "v", "configMap": {"name": name}}]},
        "_volumeMounts": [{"name": "v", "mountPath": "/etc/engine"}],
    }


def test_llm_arguments_of_a_config_map(tmp_path: Path) -> None:
    """Of two maps with a file of the name, the mounted one is read; flags come before it, overrides after."""
    first = config_map("first", args={"tensor_parallel_size": 2, "kv_cache_config": {"dtype": "fp8"}})
    second = config_map("second", args={"tensor_parallel_size": 8})
    flags = ("--max-batch-size", "4", "--tensor-parallel-size", "1", "--free-gpu-memory-fraction", "0.5")
    override = ("--override-engine-args", '{"kv_cache_config": {"tokens_per_block": 64}}')
    args = ("--model-path", "a/b", *flags, "--extra-engine-args", "/etc/engine/args.yaml", *override)
    command = ("python3", "-m", "dynamo.trtllm")
    config, _ = read(tmp_path, worker(*args, command=command, **mounted("first")), others=(first, second))
    ((_, section),) = config.sections
    assert (section.tensor_parallel_size, section.max_batch_size) == (2, 4)
    assert section.kv_cache_config == {
        "free_gpu_memory_fraction": 0.5,
        "dtype": "fp8",
        "tokens_per_block": 64,
    }


def test_flags_of_sglang_in_a_config_map(tmp_path: Path) -> None:
    flags = {"model-path": "a/b", "tp_size": 4, "ep-size": 4, "quantization": None, "page-size": 16}
    command = ("python3", "-m", "dynamo.sglang")
    one = worker("--config", "/etc/engine/agg.yaml", "--page-size", "32", command=command, **mounted("m"))
    other = {"apiVersion": "v1", "kind": "Service"}
    config, lines = read(tmp_path, one, others=(config_map("m", agg=flags), other))
    ((_, section),) = config.sections
    assert (config.model, section.tensor_parallel_size, section.moe_expert_parallel_size) == ("a/b", 4, 4)
    assert section.kv_cache_config == {"tokens_per_block": 32}, "the command line wins"
    assert "documents: not used here: Service" in lines


def test_an_engine_file_beside_the_yaml(tmp_path: Path) -> None:
    args = ("--model-path", "a/b", "--extra-engine-args", "./configs/decode.yaml")
    one = worker(*args, command=("python3", "-m", "dynamo.trtllm"))
    with pytest.raises(
        ConfigError, match=r"components\.w\.args\.extra-engine-args .*: no such file; .* copy it to"
    ):
        read(tmp_path, one)
    (tmp_path / "decode.yaml").write_text("tensor_parallel_size: 4\n")
    assert sizes(read(tmp_path, one)[0]) == [("executors", 1, 4)]


def test_workers_of_one_role_add_up(tmp_path: Path) -> None:
    two = [worker("--model", "a/b", "-tp", 2, name=name, replicas=2) for name in ("x", "y")]
    assert sizes(read(tmp_path, *two)[0]) == [("executors", 4, 2)]


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    (
        [FRONTEND],
        r"no component runs python3 -m dynamo\.\{vllm,sglang,trtllm\} \(components: components\.Frontend\)",
    ),
    (
        [worker("-m", "dynamo.mocker", command=["python3"])],
        r"components\.w: runs python3 -m dynamo\.mocker; must run",
    ),
    ([worker(command=[])], r"components\.w: has no command; must run"),
    ([script("python3 -m dynamo.vllm --model 'a/b")], r"components\.w\..*args: No closing quotation"),
    (
        [worker("--model", "a/b", "-tp", "$TP")],
        r"components\.w\.args\.tp: '\$TP' \(a string\); must be an integer",
    ),
    ([worker("--disaggregation-mode", "encode")], r"components\.w: only encodes images"),
    (
        [worker("--model", "a/b"), worker("--model", "a/b", "-tp", 2, name="x")],
        r"components\.x: its settings differ from other workers in executors",
    ),
    ([worker("--model", "a/b"), worker("--model", "a/c")], "its workers have different models: a/b, a/c"),
    (
        [worker("--model", "a/b", replicas="two")],
        r"components\.w\.replicas: 'two' \(a string\); must be an integer",
    ),
]


@pytest.mark.parametrize(("components", "message"), REFUSED)
def test_a_graph_that_cannot_be_used(tmp_path: Path, components: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"is a deploy file of Dynamo\n(?s:.*){message}"):
        read(tmp_path, *components)


def test_several_graphs_in_one_file(tmp_path: Path) -> None:
    graph = {**HEAD, "spec": {"components": [worker("--model", "a/b")]}}
    with pytest.raises(ConfigError, match="it has several documents of kind DynamoGraphDeployment"):
        read(tmp_path, worker("--model", "a/b"), others=(graph,))


def test_variables_that_double_each_other(tmp_path: Path) -> None:
    env = [{"name": "A0", "value": "x" * 100}]
    env += [{"name": f"A{i}", "value": f"$(A{i - 1})" * 2} for i in range(1, 60)]
    config, _ = read(tmp_path, worker("--model", "a/b", "--served-model-name", "$(A59)", _env=env))
    assert config.model == "a/b"
    with pytest.raises(ConfigError, match=r"args: more than 1048576 characters with its variables"):
        read(tmp_path, worker("--model", "a/b", *["$(A5)$(A5)"] * 1000, _env=env))
