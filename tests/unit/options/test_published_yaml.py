"""Published forms of a disaggregation YAML: each is named, used where it has a meaning, and else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.errors import ConfigError
from disagg.schema import SECTIONS
from mpillm.cli import main
from mpillm.errors import ExitCode
from mpillm.options.disagg_values import CORE, EXPERTS, SIZES
from mpillm.options.options import parse_run
from mpillm.options.published_servers import Node, parsed_flags, section_of_flags
from mpillm.options.published_yaml import load
from mpillm.programs.servers.sglang import SGLANG
from mpillm.programs.servers.vllm import VLLM
from tests.helpers.disagg_options import TORCH

LLM_ARGS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "max_batch_size": 4,
    "kv_cache_config": {"free_gpu_memory_fraction": 0.5},
    "cuda_graph_config": None,
}
BENCHMARK: dict[str, Any] = {
    "slurm": {"partition": "<partition>"},
    "hardware": {"gpus_per_node": 4, "num_ctx_servers": 3, "num_gen_servers": 2},
    "environment": {"model_path": "<model_path>", "work_dir": "/w"},
    "worker_config": {"ctx": LLM_ARGS, "gen": {**LLM_ARGS, "pipeline_parallel_size": 2}},
}
SRT_1: dict[str, Any] = {
    "name": "a",
    "model": {"path": "hf:org/model", "container": "c"},
    "resources": {"gpu_type": "h200", "prefill_workers": 3, "decode_workers": 2, "gpus_per_decode": 8},
    "backend": {
        "type": "trtllm",
        "decode_environment": {"A": "1"},
        "trtllm_config": {"prefill": LLM_ARGS, "decode": {**LLM_ARGS, "pipeline_parallel_size": 2}},
    },
    "frontend": {"type": "dynamo", "args": {"router-mode": "kv", "no-kv-events": True}},
    "benchmark": {"isl": 1024},
}
SRT_2: dict[str, Any] = {
    "schema": 2,
    "engine": {"type": "vllm", "connector": "nixl"},
    "roles": {
        "prefill": {
            "workers": 3,
            "gpus": 2,
            "critical": False,
            "restart": "on-failure",
            "args": {
                "tensor-parallel-size": 1,
                "data-parallel-size": 2,
                "enable-expert-parallel": True,
                "max-num-seqs": 4,
                "gpu-memory-utilization": 0.5,
                "no-enable-prefix-caching": True,
            },
        },
        "decode": {
            "workers": 2,
            "args": {"tensor-parallel-size": 2, "pipeline-parallel-size": 2, "kv-cache-dtype": "fp8"},
        },
    },
}
LLM_D: dict[str, Any] = {
    "modelArtifacts": {"uri": "hf://org/model", "size": "1Gi"},
    "prefill": {
        "replicas": 3,
        "parallelism": {"tensor": 2},
        "extra-args": "--max-num-seqs 4 --block-size=64",
    },
    "decode": {
        "replicas": 2,
        "containers": [
            {"image": "i", "args": ["--tensor-parallel-size", "2", "-pp", "--pipeline-parallel-size=2"]}
        ],
    },
}
DYNAMO: dict[str, Any] = {
    "benchmark": "deepseek-r1",
    "disagg_cluster": {"num_prefill_workers": 3, "num_decode_workers": 2},
    "prefill": {"gpus_per_worker": 2, "config": "/work/ctx.yaml"},
    "decode": {"gpus_per_worker": 4, "config": "/work/gen.yaml"},
}
SFLOW: dict[str, Any] = {
    "variables": {
        "NUM_CTX_SERVERS": {"type": "integer", "value": 3},
        "NUM_GEN_SERVERS": {"value": 2},
        "TRTLLM_YAML_CTX": {"value": "/work/ctx.yaml"},
        "TRTLLM_YAML_GEN": {"value": "/work/gen.yaml"},
        "MODEL_PATH": {"value": "/models/m"},
    }
}
GRAPH: dict[str, Any] = {
    "apiVersion": "nvidia.com/v1alpha1",
    "kind": "DynamoGraphDeployment",
    "metadata": {"name": "a"},
    "spec": {
        "services": {
            "Prefill": {
                "componentType": "worker",
                "subComponentType": "prefill",
                "replicas": 3,
                "extraPodSpec": {
                    "mainContainer": {
                        "command": ["python3", "-m", "dynamo.vllm"],
                        "args": ["--model", "org/model", "--tensor-parallel-size", "2"],
                    }
                },
            },
            "Decode": {
                "componentType": "worker",
                "replicas": 2,
                "extraPodSpec": {
                    "mainContainer": {
                        "command": ["python3", "-m", "dynamo.vllm", "-tp", "2"],
                        "args": ["--model=org/model", "--pipeline-parallel-size=2"],
                    }
                },
            },
        }
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "TensorRT-LLM's slurm/benchmark configuration": BENCHMARK,
    "a recipe of srt-slurm": SRT_1,
    "a recipe of srt-slurm, schema 2": SRT_2,
    "llm-d's values of model servers": LLM_D,
    "NVIDIA's form of a Dynamo cluster": DYNAMO,
    "NVIDIA's form for sflow": SFLOW,
    "a deploy file of Dynamo": GRAPH,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "ctx.yaml").write_text(yaml.safe_dump(LLM_ARGS))
    (tmp_path / "gen.yaml").write_text(yaml.safe_dump({**LLM_ARGS, "pipeline_parallel_size": 2}))
    return tmp_path / "recipe.yaml"


def written(file: Path, content: Any) -> str:
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return str(file)


@pytest.mark.parametrize("name", FORMS)
def test_a_published_form_becomes_instances(file: Path, name: str) -> None:
    config, form, lines = load(written(file, FORMS[name]))
    text = "\n".join(lines)
    assert name.startswith(form) and " ".join(text.split()).startswith(f"{file} is {form}")
    assert all(len(line) <= 78 or " " not in line.strip() for line in text.splitlines())
    (_, context), (_, generation) = config.sections
    assert (context.num_instances, context.tensor_parallel_size) == (3, 2)
    assert (generation.num_instances, generation.ranks_per_instance) == (2, 4)
    assert config.n_workers == 14


@pytest.mark.parametrize("name", FORMS)
def test_every_key_is_used_or_named(file: Path, name: str) -> None:
    """A key without a name in the lines changes the configuration when it is left out."""
    content = FORMS[name]
    config, _, lines = load(written(file, content))
    text = "\n".join(lines)
    for key in content:
        if key in ("name", "schema") or key in text:
            continue
        fewer = {other: value for other, value in content.items() if other != key}
        try:
            changed, _, _ = load(written(file, fewer))
        except ConfigError:
            continue
        assert changed != config, key


def test_settings_of_a_recipe(file: Path) -> None:
    config, _, lines = load(written(file, SRT_1))
    (_, context), _ = config.sections
    assert config.model == "org/model" and context.router == {"type": "kv_cache_aware"}
    assert context.kv_cache_config == {"free_gpu_memory_fraction": 0.5} and context.max_batch_size == 4
    assert [" ".join(line.split()) for line in lines] == [
        f"{file} is a recipe of srt-slurm; not used here: benchmark",
        "resources.gpus_per_decode 8: by its sizes, the server has 4 ranks",
        "model: not used here: container",
        "backend: not used here: decode_environment",
        "resources: not used here: gpu_type",
        "frontend: not used here: type",
        "frontend.args: not used here: no-kv-events",
    ]


def test_roles_with_flags_of_vllm(file: Path) -> None:
    config, _, lines = load(written(file, SRT_2))
    (_, context), (_, generation) = config.sections
    assert (context.moe_expert_parallel_size, context.max_batch_size) == (2, 4)
    assert context.extra == {"enable_attention_dp": True}
    assert context.kv_cache_config == {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": False}
    assert generation.kv_cache_config == {"dtype": "fp8"}
    for setting in ("critical", "restart"):
        assert f"roles.prefill.{setting}: not used here; see --on_instance_loss" in lines


@pytest.mark.parametrize(("is_shared", "instances"), [(True, (1, 8)), (False, (4, 8))])
def test_data_parallelism_of_sglang(file: Path, is_shared: bool, instances: tuple[int, int]) -> None:
    args = {
        "tp-size": 8,
        "dp-size": 4,
        "ep-size": 8,
        "enable-dp-attention": is_shared,
        "chunked-prefill-size": -1,
    }
    backend = {"sglang_config": {"aggregated": {**args, "kv-cache-dtype": "fp8_e4m3"}}}
    config, _, _ = load(written(file, {"resources": {"agg_workers": 1}, "backend": backend}))
    ((name, server),) = config.sections
    assert (name, (server.num_instances, server.ranks_per_instance)) == ("executors", instances)
    assert server.kv_cache_config == {"dtype": "fp8"} and server.extra["enable_chunked_prefill"] is False


@pytest.mark.parametrize(("kind", "is_sglang"), [(VLLM, False), (SGLANG, True)])
def test_flags_mean_what_own_servers_get(kind: Any, is_sglang: bool) -> None:
    """The other direction of `ServerKind.options`."""
    values = {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "load_format": "dummy"}
    keys = {key.field.name: key.key for key in (EXPERTS, *CORE, *SIZES[SECTIONS[2]])}
    for name in kind.options.keys() & keys.keys():
        value = values.get(name, False if name.startswith("enable") else 0.5 if "fraction" in name else 8)
        flags = parsed_flags(kind.options[name](value))
        if name == "moe_expert_parallelism":
            flags |= parsed_flags(kind.options["tensor_parallelism"](value))
        found: Any = section_of_flags(Node(flags, "f"), is_sglang)[0]
        for key in keys[name]:
            found = found[key]
        assert found == value, name


MANIFEST = "apiVersion: apps/v1\nkind: Deployment\nspec: {}\n"
REFUSED: list[tuple[Any, str]] = [
    (MANIFEST, "a Kubernetes manifest\nit describes pods"),
    (f"{MANIFEST}---\n{MANIFEST}", "a Kubernetes manifest\nit describes pods"),
    (LLM_ARGS, "the LLM-API options of one server (trtllm-serve --config)\nit lacks the other phase"),
    ({"UCX_TLS": "rc", "TLLM_LOG_LEVEL": "INFO"}, "a list of environment variables\nexport them"),
    (
        {"base": SRT_1, "override_a": {}, "zip_override_b": {}},
        "a recipe of srt-slurm\nit has several variants (override_a, zip_override_b)",
    ),
    (SRT_1 | {"backend": {"type": "mocker"}}, "a recipe of srt-slurm\n{file}: engine 'mocker'"),
    (
        {"decode": {"containers": [{"args": ["--max-num-seqs", "8"]}]}},
        "llm-d's values of model servers\n{file}: decode.replicas: missing; add the number of servers",
    ),
    (
        DYNAMO | {"decode": {"config": "/work/none.yaml"}},
        "NVIDIA's form of a Dynamo cluster\n{file}: decode.config /work/none.yaml: no such file",
    ),
    (
        BENCHMARK | {"hardware": {"num_ctx_servers": "two"}},
        "TensorRT-LLM's slurm/benchmark configuration\n{file}: hardware.num_ctx_servers: 'two'",
    ),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_a_form_that_cannot_be_used_is_named(
    file: Path, capsys: pytest.CaptureFixture[str], content: Any, message: str
) -> None:
    path = written(file, content)
    with pytest.raises(ConfigError) as error:
        parse_run([*TORCH, "--disagg_config", path])
    assert str(error.value).startswith(f"{path} is {message.format(file=path)}")
    assert main(["plan", "--disagg_config", path]) == ExitCode.USAGE
    assert str(error.value).splitlines()[1] in capsys.readouterr().err


@pytest.mark.parametrize("content", [{"servers": 3}, {"hostname": "a"}, {"model": "m", "prefill": {}}])
def test_an_unknown_form_gets_the_sections_that_it_lacks(file: Path, content: Any) -> None:
    with pytest.raises(ConfigError, match="lacks context_servers and generation_servers; ") as error:
        load(written(file, content))
    example = str(error.value).partition("\n")[2]
    assert load(written(file, example))[0].n_workers == 10


def test_servers_of_tensorrt_llm_cannot_read_a_published_form(file: Path) -> None:
    with pytest.raises(
        ConfigError, match="is a recipe of srt-slurm; servers of TensorRT-LLM read a disagg_config"
    ):
        parse_run(["--core_type", "trtllm_disagg", "--disagg_config", written(file, SRT_1)])


def test_a_folder_wins_over_a_hub_name(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(file, {"model": "org/model", "executors": {"num_instances": 2}})
    config = parse_run(["--core_type", "dummy", "--disagg_config", path, "--model_path", str(tmp_path)])
    assert config.model_path == str(tmp_path) and config.yaml and config.yaml.model == str(tmp_path)
    line = f"--model_path {tmp_path} is used instead of {path}: model org/model"
    assert config.yaml_lines == (line,)
    assert main(["plan", "--disagg_config", path, "--core_type", "dummy", "--model_path", str(tmp_path)]) == 0
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(("model", "option"), [("org/model", "org/other"), ("{folder}", "{folder}/more")])
def test_two_names_or_two_folders_contradict(file: Path, tmp_path: Path, model: str, option: str) -> None:
    (tmp_path / "more").mkdir()
    path = written(file, {"model": model.format(folder=tmp_path), "executors": {}})
    with pytest.raises(ConfigError, match="leave one of them out"):
        parse_run([*TORCH, "--disagg_config", path, "--model_path", option.format(folder=tmp_path)])
