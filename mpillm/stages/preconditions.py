"""Checks before a stage starts: model, divisibility of sizes, disk space."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about
from launch.command import NotHere
from mpillm.files import read_object
from mpillm.options.run_config import RunConfig

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class EngineParallelism:
    """Tensor and pipeline parallel sizes of an engine; expert parallelism is inside the TP group."""

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size

    def __str__(self) -> str:
        return f"tp{self.tp_size}-pp{self.pp_size}" + (f"-ep{self.ep_size}" if self.ep_size > 1 else "")


@about("model_path")
def model_config(folder: Path) -> dict[str, Any]:
    """Return the `config.json` of a model's folder, which must also have weights."""
    if not folder.is_dir():
        raise NotHere(f"--model_path {folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model_path {folder}: there is no config.json in it")
    if not weights(folder):
        raise NotHere(f"--model_path {folder}: no weights ({' or '.join(WEIGHTS)})")
    return read_object(folder / "config.json")


def weights(folder: Path) -> list[Path]:
    """Return the weight files of a model's folder."""
    return [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]


@about("tensor_parallelism", "pipeline_parallelism", "moe_expert_parallelism")
def check_divides(config: dict[str, Any], layout: EngineParallelism) -> None:
    """Raise ConfigError if a Hugging Face `config.json` does not allow the layout.

    TensorRT-LLM detects it late.
    """
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    kv_heads = config.get("num_key_value_heads", heads)
    experts = config.get("num_local_experts", config.get("num_experts"))
    tp, pp, ep = layout.tp_size, layout.pp_size, layout.ep_size
    wrong = ""
    if isinstance(heads, int) and heads % tp:
        wrong = f"--tensor_parallelism {tp}: the model has {heads} attention heads"
    elif isinstance(kv_heads, int) and kv_heads % tp and tp % kv_heads:
        wrong = f"--tensor_parallelism {tp}: the model has {kv_heads} KV heads"
    elif isinstance(layers, int) and layers < pp:
        wrong = f"--pipeline_parallelism {pp}: the model has {layers} layers"
    elif ep > 1 and not isinstance(experts, int):
        wrong = f"--moe_expert_parallelism {ep}: the model has no experts"
    elif isinstance(experts, int) and experts % ep:
        wrong = f"--moe_expert_parallelism {ep}: the model has {experts} experts"
    elif tp % ep:
        wrong = f"--moe_expert_parallelism {ep}: it splits the TP group of --tensor_parallelism {tp}"
    if wrong:
        raise ConfigError(f"{wrong}, which it does not divide")


def check_space(target: Path, needed: int) -> None:
    """Raise ConfigError if the disk of `target` has fewer than `needed` free bytes."""
    folder = next(above for above in (target.absolute(), *target.absolute().parents) if above.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NotHere(
            f"{target}: about {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free on that disk"
        )


def raise_or_note(config: RunConfig, problem: NotHere) -> None:
    """Raise `problem`; in a dry run, only print it."""
    if not config.dry_run:
        raise problem
    print(f"# can't run here: {problem}")
