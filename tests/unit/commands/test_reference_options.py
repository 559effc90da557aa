"""docs/reference/reference_options.md: every option of the reference texts is a field with the default said,
and its tests are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from mpillm.data import model_files
from mpillm.nvidia import backends as harness_config
from mpillm.nvidia import configs
from mpillm.options import generation_config
from mpillm.options.fields import BY_NAME
from mpillm.options.fields.runtime_flags import RUNTIME_FLAGS
from mpillm.options.flags import OVERLAYS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "reference_options.md").read_text()
ROWS = [
    [cell.strip() for cell in line[1:-1].split("|")] for line in PAGE.splitlines() if line.startswith("| `")
]
OPTIONS = [(name, row[1].strip("`")) for row in ROWS for name in re.findall(r"`--(\w+)`", row[0])]

# Every option that llmlib-readme.md and triton-harness-readme.md name, and what their configurations set.
NAMED = (
    "benchmarks",
    "scenarios",
    "core_type",
    "harness_type",
    "accuracy_target",
    "models",
    "engine_dir",
    "use_triton",
    "gpu_batch_size",
    "offline_expected_qps",
    "llm_quantizer_outdir",
    "quantizer_lib_path_override",
    "trtllm_checkpoint_flags",
    "tensor_parallelism",
    "pipeline_parallelism",
    "moe_expert_parallelism",
    "trtllm_build_flags",
    "llm_gen_config_path",
    "trtllm_runtime_flags",
    "triton_server_urls",
    "trtllm_server_urls",
    "triton_num_clients_per_server",
    "triton_num_models_per_server",
    "show_steady_state_progress",
    "traffic_distribution_policy",
    "trtllm_disagg_config_path",
    "triton_num_servers",
    "triton_num_frontends_per_model",
    "triton_num_clients_per_frontend",
    "triton_skip_server_spawn",
    "triton_grpc_ports",
)
# Of fields without a default of their own: what the classes are built with, or what it follows from.
CLASS_DEFAULTS = {
    "tensor_parallelism": harness_config.HarnessConfig.tensor_parallelism,
    "pipeline_parallelism": harness_config.HarnessConfig.pipeline_parallelism,
    "moe_expert_parallelism": harness_config.HarnessConfig.moe_expert_parallelism,
    "triton_num_models_per_server": "by the GPUs",
    "triton_num_servers": "by the GPUs",
    "trtllm_server_urls": ",".join(configs.TrtllmEndpointConfig.endpoint_urls),
}


@cache
def functions(file: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("test", sorted(set(re.findall(r"`(tests/\S+?::\w+)`", PAGE))))
def test_every_test_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in functions(file)


@pytest.mark.parametrize("name", NAMED)
def test_every_option_is_on_the_page_and_a_field(name: str) -> None:
    assert name in BY_NAME
    assert name in dict(OPTIONS)


@pytest.mark.parametrize(("name", "default"), OPTIONS)
def test_every_default_is_right(name: str, default: str) -> None:
    assert default == (BY_NAME[name].default_text or str(CLASS_DEFAULTS.get(name, "")))


def test_every_row_has_a_test() -> None:
    assert len(ROWS) > 40
    assert [row[0] for row in ROWS if "`tests/" not in row[-1]] == []


@pytest.mark.parametrize("stage", ["CHECKPOINT", "BUILD", "RUNTIME"])
def test_every_environment_variable(stage: str) -> None:
    assert f"TRTLLM_{stage}_FLAGS" in OVERLAYS.values()
    assert f"| `TRTLLM_{stage}_FLAGS` |" in PAGE


def test_every_runtime_flag() -> None:
    flags = {row[0].strip("`"): row[1].strip("`") for row in ROWS if row[0].strip("`") in RUNTIME_FLAGS}
    assert flags == {name: field.default_text for name, field in RUNTIME_FLAGS.items() if field.default_text}


def test_every_class() -> None:
    for name in re.findall(r"`(\w+Config)`", PAGE):
        assert any(
            hasattr(module, name) for module in (harness_config, configs, model_files, generation_config)
        )
