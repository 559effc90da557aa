"""What `plan` says of memory and GPUs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpillm.cli import main
from mpillm.cores.torch_core import TorchCore
from mpillm.devices import Gpu
from mpillm.engine.shape import model_info
from mpillm.engine.shape.find_model import PRESETS
from mpillm.errors import ExitCode
from mpillm.runtime.plan_memory import idle_gpus
from tests.helpers.make_checkpoint import make_tokenizer

TORCH = ("--core_type", "torch", "--load_format", "dummy", "--device", "cpu")
GPUS = tuple(Gpu(f"uuid-{i}", "H100", 80 << 30, 79 << 30) for i in range(4))


def plan_output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["plan", *map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_memory_of_a_rank_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3.1 8B in bfloat16: 8.03e9 weights; 32 layers of 8 heads of 128 keys and values."""
    words = ("--world_size", 3, "--nodes", "elsewhere:3", "--model_path", "llama3.1-8b")
    assert (
        "memory: a rank of instances 0-1 holds 15.0 GiB of weights, and 128 KiB of KV cache for each token"
        in plan_output(capsys, *words)
    )
    halves = plan_output(capsys, *words, "--tensor_parallelism", 2, "--kv_cache_tokens", 16384)
    assert "a rank of instance 0 holds 7.5 GiB of weights, and 64 KiB of KV cache for each token" in halves
    assert "64 KiB of KV cache for each token, 1.0 GiB for 16,384" in halves
    assert "refused" not in halves, "the memory of another host is unknown"


def test_a_model_that_does_not_fit_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cache = ("--kv_cache_tokens", 500_000_000)  # 60 TiB
    output = plan_output(capsys, "--world_size", 2, "--model_path", "llama3.1-8b", *cache)
    assert "here a run would be refused: llama3.1-8b does not fit: it needs " in output
    assert re.search(r"[\d.]+ GiB are available", output)
    assert "refused" not in plan_output(capsys, "--world_size", 2, "--model_path", "tiny-llama")
    assert "memory" not in plan_output(
        capsys, "--world_size", 2, "--model_path", "tiny-llama", "--core_type", "dummy"
    )


@pytest.mark.parametrize(
    "core",
    [("--url", "a:1"), ("--server", "vllm"), ("--core_type", "triton_grpc"), ("--core_type", "dummy")],
    ids=lambda core: core[1],
)
def test_a_missing_folder_of_a_client_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, core: tuple[str, ...]
) -> None:
    """A run does so as well. A workload's own folder may be missing."""
    output = plan_output(capsys, "--world_size", 2, *core, "--model_path", "Org/Model")
    assert "here a run would be refused: --model_path Org/Model: no such folder; " in output
    assert "hf download Org/Model" in output
    make_tokenizer(tmp_path)
    for other in (("--model_path", tmp_path), ("--benchmarks", "llama2-70b", "--tensor_parallelism", 1)):
        assert "refused" not in plan_output(capsys, "--world_size", 2, *core, *other)


def test_a_missing_folder_in_the_yaml_is_refused_where_prompts_are_texts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(json.dumps({"model": "Org/Model", "context_servers": {}, "generation_servers": {}}))
    output = plan_output(capsys, "--disagg_config", file, "--core_type", "dummy")
    assert "here a run would be refused: --model_path Org/Model: no such folder; " in output
    assert "a text has no tokens without it: copy it from the model, or give token ids" in output
    assert "model_path is set by " in output


@pytest.mark.parametrize(
    "core", [TORCH, ("--core_type", "dummy"), ("--url", "a:1")], ids=lambda core: core[1]
)
@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model"])
def test_a_tokenizer_in_another_form_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, core: tuple[str, ...], name: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text((PRESETS / "tiny-llama.json").read_text())
    (tmp_path / name).touch()
    words = ("--world_size", 2, "--model_path", tmp_path, *core)
    output = plan_output(capsys, *words)
    assert f"here a run would be refused: {tmp_path} has {name} but no tokenizer.json; write one" in output
    (tmp_path / name).unlink()
    is_needed = "--url" not in core  # a server gets texts
    refusal = "no tokenizer.json in it; a text has no tokens without it: copy it from the model, or"
    assert (refusal in plan_output(capsys, *words)) == is_needed


def test_a_refusal_is_printed_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each instance, although the available memory changes. A run reports the first."""
    left = iter(range(20 << 30, 0, -(1 << 28)))
    monkeypatch.setattr(model_info, "available_bytes", lambda: next(left))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = ("--world_size", 4, "--model_path", "llama3.1-8b", "--mode", "disaggregated")
    assert (
        plan_output(capsys, *options, "--ctx_tp_size", 2).count("would be refused: llama3.1-8b does not fit")
        == 1
    )
    output = plan_output(capsys, *options, "--device", "cuda")
    assert output.count("refused") == 1 and "needs one GPU per worker rank" in output


def test_caches_of_two_types_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As the handoff of a run does."""
    file = tmp_path / "d.yaml"
    fp8 = {"kv_cache_config": {"dtype": "fp8"}}
    for context, is_refused in ({}, True), (fp8, False):
        content = {"model": "tiny-llama", "context_servers": context, "generation_servers": fp8}
        file.write_text(json.dumps(content))
        refusal = (
            "here a run would be refused: context instances have a KV cache in float32 and generation"
            " instances have a KV cache in fp8"
        )
        assert (refusal in plan_output(capsys, "--disagg_config", file, "--device", "cpu")) == is_refused


def test_flags_beyond_the_engines_limits_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--trtllm_build_flags", "max_batch_size:4", "--trtllm_runtime_flags", "max_batch_size:8")
    assert main(["plan", "--world_size", "3", "--model_path", "tiny-llama", *flags]) == ExitCode.USAGE
    assert "max_batch_size is 8, more than the 4 of trtllm_build_flags" in capsys.readouterr().err


def test_gpus_here_are_looked_at(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchCore, "gpus", classmethod(lambda cls: GPUS))
    output = plan_output(capsys, "--world_size", 4, "--model_path", "llama3.1-8b")
    assert "no rank takes GPU 3 of localhost: idle in this run" in output and "refused" not in output
    output = plan_output(capsys, "--world_size", 3, "--model_path", "llama3.1-405b")
    assert "here a run would be refused: llama3.1-405b does not fit: a GPU of instance" in output
    output = plan_output(capsys, "--world_size", 6, "--model_path", "llama3.1-8b")
    assert "node localhost needs one GPU per worker rank (5), but the core can use 4 there" in output


def test_idle_gpus_are_those_of_nobody() -> None:
    """By node; none are idle where the ranks compute on CPUs."""
    ranks = [SimpleNamespace(rank=rank, node=node) for rank, node in enumerate(("a", "a", "b"))]
    plan: Any = SimpleNamespace(ranks=ranks)
    there = tuple(gpu._replace(uuid=f"b-{gpu.uuid}") for gpu in GPUS)
    seen = [GPUS, GPUS, there]
    assert idle_gpus(plan, seen, {}) == []
    assert idle_gpus(plan, seen, {1: (2,), 2: (0,)}) == [
        "no rank takes GPUs 0-1, 3 of a: idle in this run",
        "no rank takes GPUs 1-3 of b: idle in this run",
    ]
    assert idle_gpus(plan, [GPUS[:1], GPUS[:1], ()], {1: (0,)}) == []
