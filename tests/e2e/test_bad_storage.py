"""A rank that is lost while it reads a checkpoint names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.presets import save_preset
from tests.helpers.support import INSTANCE_LOST, ROOT, Starter

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def save_shards(folder: Path) -> None:
    """Write tiny-llama with the last norm alone in the second of two files, behind many bytes."""
    save_preset("tiny-llama", folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    second = {"model.norm.weight": tensors.pop("model.norm.weight")}
    second |= {"lm_head.weight": tensors.pop("lm_head.weight")}  # larger: the file has it first
    for name, part in zip(SHARDS, (tensors, second), strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    index = dict.fromkeys(tensors, SHARDS[0]) | dict.fromkeys(second, SHARDS[1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        ("truncate", ["SIGBUS ended it", "a mapped file is shorter than before, or its storage fails"]),
        ("hang", ["no heartbeat for 8 s (--heartbeat_timeout); last seen in phase "]),
    ],
)
def test_the_file_that_a_rank_reads_is_named(one: Starter, fault: str, causes: list[str]) -> None:
    folder = one.folder / "model"
    save_shards(folder)
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": fault, "MPILLM_TEST_FILE": str(folder / SHARDS[1])}
    options = ["--dataset", "synthetic", "--model_path", folder, "--heartbeat_timeout", 8, "--grace", 1.5]
    ended = one.run(2, *options, core="tests.helpers.plugin_torch_cores:BadStorage", env=env)
    ended.must(INSTANCE_LOST)
    causes += [f"the file that it read last: {folder / SHARDS[1]}"]
    assert all(cause in ended.message for cause in causes), repr(ended)
    (failure,) = ended.result["failures"]
    assert failure["rank"] == 1 and all(cause in failure["cause"] for cause in causes)
