"""The folder of an EAGLE-3 head, in the format of its authors and vLLM: read and checked without torch.

Li et al., EAGLE-3, 2025. Tensors: `fc`, one decoder layer (`midlayer.` or `layers.0.`) whose q, k and v read
an embedding and a hidden state side by side, `norm`, `lm_head` for the head's own, smaller vocabulary, and
`d2t`. A token of that vocabulary plus its number in `d2t` is the model's token. `embed_tokens` is the
model's, unless the folder has one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.entries import Entry
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.read_config import architecture_of, parse_model
from mpillm.engine.shape.speculative_config import EAGLE, read_speculation
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from mpillm.engine.shape.weight_files import read_header, weight_files
from mpillm.files import as_written, read_object

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Fields of variants that are not supported, each with the value that it must have.
_PLAIN = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "num_hidden_layers": 1,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
}
LAYER = "model.layers.0."
EMBEDDING = "embed_tokens.weight"
_PREFIXES = "midlayer.", "layers.0."


@dataclass(frozen=True)
class EagleConfig:
    """A draft head's configuration, before the head is loaded."""

    folder: Path
    model: ModelConfig  # of one layer; its vocabulary is the head's own
    vocab_size: int  # the model's
    layers: tuple[int, ...]  # layers of the model, whose outputs the head reads
    norm_before_residual: bool
    # File of each tensor, and the tensor's name in the file. Key: the name that it would have in a model.
    names: dict[str, tuple[Path, str]]


def eagle_config(config: EngineConfig, target: ModelConfig) -> EagleConfig | None:
    """Return the draft head for `target`; None if the instance has none. Raises as `read_eagle` does."""
    how = read_speculation(config)
    if how is None or how.decoding_type != EAGLE:
        return None
    return read_eagle(Path(how.speculative_model), target)


@about("speculative_config")
def read_eagle(folder: Path, target: ModelConfig) -> EagleConfig:
    """Return the head in `folder`. Raises ConfigError if there is none, or if it does not fit `target`."""
    source = folder / "config.json"
    if not source.is_file():
        raise ConfigError(f"{source}: no such file; an EAGLE-3 head is a folder with one")
    raw = read_object(source)
    with as_written(source, "no config.json of an EAGLE-3 head"):
        return _read(folder, source, raw, target)


def _read(folder: Path, source: Path, raw: dict[str, Any], target: ModelConfig) -> EagleConfig:
    name = architecture_of(raw)
    if name not in _ARCHITECTURES:
        raise ConfigError(
            f"{source}: architecture {name[:60]} is no EAGLE-3 head: {', '.join(_ARCHITECTURES)}"
        )
    more = raw.get("eagle_config") or {}
    for name, allowed in _PLAIN.items():
        if (value := more.get(name, raw.get(name, allowed))) != allowed:
            raise ConfigError(f"{source}: {name} {value} is not supported by the torch core")
    model = parse_model(raw, source)
    for name in ("hidden_size", "vocab_size"):
        if getattr(model, name) != getattr(target, name):
            raise ConfigError(
                f"{source}: its {name} is {getattr(model, name)}, the model's {getattr(target, name)}"
            )
    n_drafted = raw.get("draft_vocab_size") or model.vocab_size
    n = target.n_layers
    before = more.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(i - 1 for i in before or (2, n // 2, n - 3))  # each names the layer that reads the output
    if list(layers) != sorted({i for i in layers if 0 <= i < n - 1}):
        raise ConfigError(
            f"{source}: it reads the inputs of layers {[i + 1 for i in layers]} of a model of {n}"
        )
    head = dataclasses.replace(model, vocab_size=n_drafted, tie_word_embeddings=False)
    before_residual = bool(raw.get("norm_before_residual", False))
    shapes = tensors(head, len(layers), mapped=n_drafted != model.vocab_size)
    names = _names(folder, shapes, {EMBEDDING: (model.vocab_size, model.hidden_size)})
    return EagleConfig(folder, head, model.vocab_size, layers, before_residual, names)


def _names(
    folder: Path, needed: dict[str, tuple[int, ...]], known: dict[str, tuple[int, ...]]
) -> dict[str, tuple[Path, str]]:
    """Return where each tensor is. Raises ConfigError if one is missing or has another shape."""
    stored: dict[str, tuple[Path, str, Entry]] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file).items():
            plain = name.removeprefix("model.")
            for prefix in _PREFIXES:
                if plain.startswith(prefix):
                    plain = LAYER + plain.removeprefix(prefix)
            stored[plain] = file, name, entry
    for name in needed:
        if name not in stored:
            raise ConfigError(f"{folder}: no tensor {name.replace(LAYER, _PREFIXES[0])} of an EAGLE-3 head")
    for name, shape in (known | needed).items():
        if name in stored and (has := stored[name][2].shape) != shape:
            raise ConfigError(f"{folder}: tensor {stored[name][1]} has shape {list(has)}, not {list(shape)}")
    return {name: (file, own_name) for name, (file, own_name, _) in stored.items()}


def tensors(model: ModelConfig, n_layers: int, *, mapped: bool) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a head must have.

    The head's layer has the names of a model's first layer.
    """
    h, wide = model.hidden_size, ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    shapes: dict[str, tuple[int, ...]] = {
        name: (shape[0], 2 * h) if name.endswith(wide) else shape
        for name, shape in tensor_shapes(model).items()
        if name.startswith(LAYER)
    }
    shapes |= {
        f"{LAYER}hidden_norm.weight": (h,),
        "fc.weight": (h, n_layers * h),
        "norm.weight": (h,),
        "lm_head.weight": (model.vocab_size, h),
    }
    return shapes | ({"d2t": (model.vocab_size,)} if mapped else {})
