"""What a submission says of the system and the weights is what the runs recorded."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mpillm.submission.rules import SYSTEM_MAY_BE_EMPTY, SYSTEM_MEANINGFUL
from tests.helpers.run_directories import MACHINE
from tests.helpers.submissions import Maker


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


def test_the_gpus_of_servers_that_ranks_own_are_counted(maker: Maker) -> None:
    """Two servers of four on one node, each with two clients, which have none."""
    result = {"per_instance": [{"instance": i, "frameworks": ["vLLM 0.33.0"]} for i in range(4)]}
    runs = maker.runs(core_type="trtllm_endpoint", result=result)
    ranks = [{"rank": 0, "roles": ["harness", "leader"], "node": "n0", "device": None}]
    for rank in range(1, 5):
        roles, devices = (["server", "executor"], [0, 1, 2, 3]) if rank % 2 else (["executor"], [])
        ranks += [{"rank": rank, "roles": roles, "node": "n0", "device": None, "server_devices": devices}]
    for run in runs:
        (run / "plan.json").write_text(json.dumps({"world_size": 5, "ranks": ranks}))
    maker.submit(*runs, code=4)
    system = json.loads((maker.tree / "systems" / "8xH200.json").read_text())
    assert (system["accelerators_per_node"], system["accelerator_model_name"]) == ("8", "NVIDIA H200")


@pytest.mark.parametrize(
    ("frameworks", "framework"),
    [
        ([["vLLM 0.32.0+cpu"], ["mpillm 0.1.0"]], "mpillm 0.1.0, vLLM 0.32.0+cpu"),
        ([["vLLM 0.32.0+cpu"], []], "N/A"),  # one of the servers reports none
    ],
)
@pytest.mark.parametrize("core", ["trtllm_endpoint", "triton_grpc"])
def test_the_framework_of_a_client_is_that_of_its_servers(
    maker: Maker, frameworks: list[list[str]], framework: str, core: str
) -> None:
    result = {"per_instance": [{"instance": i, "frameworks": names} for i, names in enumerate(frameworks)]}
    out = maker.submit(*maker.runs(core_type=core, result=result), code=4)
    system = json.loads((maker.tree / "systems" / "8xH200.json").read_text())
    assert system["framework"] == framework
    blank = re.search(r'the system description has "N/A" for: (.*) \(', out)
    assert blank and ("framework" in blank[1].split(", ")) == (framework == "N/A")


def test_paths_that_no_file_can_have(maker: Maker) -> None:
    """As a damaged config.json may name them: nothing is known of such a model."""
    long = "[" * 5000
    out = maker.submit(*maker.runs(model_path=long, engine_dir=long, dtype="auto"), code=4)
    assert "weight_data_types of measurements.json is not known" in out


@pytest.mark.parametrize("core", ["trtllm_endpoint", "trtllm_disagg", "triton_grpc"])
def test_the_submitter_must_describe_the_weights_of_servers(maker: Maker, core: str) -> None:
    """A client's options, and its tokenizer's model, do not describe a server's weights."""
    model = maker.folder / "Llama-2-70b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    runs = maker.runs(core_type=core, model_path=str(model), dtype="auto", result={"per_instance": []})
    out = maker.submit(*runs, code=4)
    for key in ("weight_data_types", "weight_transformations"):
        assert f"{key} of measurements.json is not known (the servers do not report it): add it with" in out
    measurements = maker.folder / "weights.json"
    measurements.write_text(
        json.dumps({"weight_data_types": "fp8", "weight_transformations": "quantization"})
    )
    out = maker.submit(*runs, "--measurements", measurements, "--force", code=4)
    assert "measurements.json" not in out
    found = json.loads((maker.tree / "results/8xH200/llama2-70b-99.9/Offline/measurements.json").read_text())
    assert (found["weight_data_types"], found["weight_transformations"]) == ("fp8", "quantization")


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
