"""Engine folders: models that `build_engine` built for a layout. Read them, and check that they fit a run.

This module does not need torch. `config.json` has the form of TensorRT-LLM's engines: `pretrained_config` is
the model's own `config.json` with `dtype`, `mapping` and `quantization`, and `build_config` has the builder's
options. `rank<r>.safetensors` has the tensors of rank r of an instance, counted stage by stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about
from mpillm.engine.shape.checkpoint_folder import digests
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.entries import Entry, int4_group, rank_entries
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.read_config import architecture_of
from mpillm.engine.shape.weight_files import read_header, weight_files
from mpillm.files import read_object
from mpillm.version import __version__

FORMAT = 1  # of the files: another number means other tensors
# TensorRT-LLM's names
_ALGORITHMS = {"none": None, "int8": "W8A16", "fp8": "FP8", "mxfp4": "W4A16_MXFP4", "int4": "W4A16_GPTQ"}
# Fields of `ModelConfig` in which an engine may differ from its checkpoint.
_OF_WEIGHTS = ("dtype", "quantization", "kv_quantization", "stored", "group")
_KV_ALGORITHMS = {"none": None, "fp8": "FP8"}


@dataclass(frozen=True)
class EngineFolder:
    """The `config.json` of an engine."""

    folder: Path
    pretrained_config: dict[str, Any]
    layout: RankLayout  # of its first rank
    dtype: str
    quantization: str
    kv_quantization: str  # fp8: the files have scales for the KV cache
    group: int  # int4: inputs that share a scale
    digests: tuple[str, ...]  # of its checkpoint, and of the checkpoint that this was quantized from

    def file(self, layout: RankLayout) -> Path:
        return self.folder / file_name(layout)


def preset_digest(name: str) -> str:
    """Return the text that replaces the digest of a preset, whose weights are random."""
    return f"preset {name}"


def file_name(layout: RankLayout) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"rank{layout.pp_rank * layout.tp_size + layout.tp_rank}.safetensors"


def layouts(first: RankLayout) -> list[RankLayout]:
    """Return the layouts of all ranks of an instance, in order; `first` is one of them."""
    ranks = itertools.product(range(first.pp_size), range(first.tp_size))
    return [dataclasses.replace(first, tp_rank=tp_rank, pp_rank=pp_rank) for pp_rank, tp_rank in ranks]


def engine_json(
    raw: dict[str, Any],
    model: ModelConfig,
    layout: RankLayout,
    dtype: str,
    quantization: str,
    source: dict[str, Any],
    flags: dict[str, Any],
) -> dict[str, Any]:
    """Return an engine's `config.json`: of `model` with config `raw`, built from `source` with `flags`."""
    mapping = {
        "world_size": layout.tp_size * layout.pp_size,
        "tp_size": layout.tp_size,
        "pp_size": layout.pp_size,
        "moe_tp_size": layout.tp_size // layout.ep_size,
        "moe_ep_size": layout.ep_size,
    }
    pretrained = {
        name: value for name, value in raw.items() if name not in ("quantization_config", "torch_dtype")
    }
    # TensorRT-LLM's name of the field
    pretrained["architecture"] = architecture_of(raw)
    quantized = {
        "quant_algo": _ALGORITHMS[quantization],
        "kv_cache_quant_algo": _KV_ALGORITHMS[model.kv_quantization],
        **({"group_size": int4_group(model)} if model.group else {}),
    }
    return {
        "version": __version__,
        "format": FORMAT,
        "pretrained_config": pretrained | {"dtype": dtype, "mapping": mapping, "quantization": quantized},
        "build_config": flags,
        "source": source,
    }


@about("engine_dir")
def read_engine(folder: Path) -> EngineFolder:
    """Read an engine. Raises ConfigError if `folder` does not hold an engine of mpillm."""
    if not folder.is_dir():
        raise ConfigError(
            f"--engine_dir {folder}: no such folder (`python -m mpillm generate-engines` makes an engine)"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"--engine_dir {folder}: no config.json in it"
            " (`python -m mpillm generate-engines` makes an engine)"
        )
    raw = read_object(file)
    if raw.get("format") != FORMAT:
        raise ConfigError(
            f"{file}: not an engine of format {FORMAT} (`python -m mpillm generate-engines` makes one)"
        )
    try:
        pretrained, mapping = raw["pretrained_config"], raw["pretrained_config"]["mapping"]
        algorithm, kv_algorithm = (
            pretrained["quantization"][name] for name in ("quant_algo", "kv_cache_quant_algo")
        )
        layout = RankLayout(*(int(mapping[name]) for name in ("tp_size", "pp_size", "moe_ep_size")))
        quantization = next(name for name, value in _ALGORITHMS.items() if value == algorithm)
        kv_quantization = next(name for name, value in _KV_ALGORITHMS.items() if value == kv_algorithm)
        group = int(pretrained["quantization"].get("group_size", 0))
        dtype, digests = str(pretrained["dtype"]), tuple(raw["source"]["digests"])
        return EngineFolder(folder, pretrained, layout, dtype, quantization, kv_quantization, group, digests)
    except (ArithmeticError, KeyError, TypeError, ValueError, StopIteration) as error:
        raise ConfigError(f"{file}: not an engine's config.json ({type(error).__name__}: {error})") from None


@about("engine_dir", "load_format", "dtype", "quantization", "model_path")
def check_engine(
    engine: EngineFolder, built: ModelConfig, config: EngineConfig, model: ModelConfig, source: Path | None
) -> None:
    """Raise ConfigError unless `engine`, of model `built`, is complete and fits `model` and `config`.

    `source` is the folder of `model` (None: a preset). If the folder has no weights any more, only shapes are
    compared.
    """
    option = f"--engine_dir {engine.folder}"
    if config.load_format == "dummy":
        raise ConfigError(f"{option}: --load_format dummy makes random weights; leave out one of them")
    layout = RankLayout(config.tp_size, config.pp_size, config.ep_size)
    if layout != engine.layout:
        raise ConfigError(
            f"{option}: built for {_sizes(engine.layout)}; instance {config.instance} has {_sizes(layout)}"
        )
    for name in ("dtype", "quantization"):
        value, has = getattr(config, name), getattr(engine, name)
        if value not in ("auto", has):
            raise ConfigError(f"{option}: built with {name} {has}, not with --{name} {value}")
    has_weights = source is None or all(file.is_file() for file in weight_files(source))
    own = _OF_WEIGHTS if has_weights else (*_OF_WEIGHTS, "tie_word_embeddings")
    for field in dataclasses.fields(built):
        value, built_value = getattr(model, field.name), getattr(built, field.name)
        if value != built_value and field.name not in own:
            raise ConfigError(
                f"{option}: built from another model than {config.model_path}:"
                f" {field.name} {built_value}, not {value}"
            )
    formats = engine.dtype, engine.quantization, engine.kv_quantization
    grouped = dataclasses.replace(built, group=engine.group)
    for layout in layouts(engine.layout):
        _check_file(engine.file(layout), rank_entries(grouped, layout, *formats))
    if source is None:
        digest = preset_digest(str(config.model_path))
    elif has_weights:
        digest = digests(source)[0]
    else:
        return
    if digest not in engine.digests:
        raise ConfigError(
            f"{option}: built from other weights than those of {config.model_path}; build it again"
        )


def _check_file(file: Path, expected: dict[str, Entry]) -> None:
    header = read_header(file)
    for name in (*expected, *header):
        if header.get(name) != expected.get(name):
            raise ConfigError(
                f"{file}: tensor {name}: expected {_entry(expected.get(name))},"
                f" found {_entry(header.get(name))}"
            )


def _entry(entry: Entry | None) -> str:
    return "none" if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _sizes(layout: RankLayout) -> str:
    return f"TP {layout.tp_size}, PP {layout.pp_size}, EP {layout.ep_size}"
