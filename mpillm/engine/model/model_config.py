"""The shape of a model, read from `config.json` without torch and without reading weights.

A model is a Hugging Face folder (`config.json`, `*.safetensors`, `generation_config.json`) or the name of a
preset: a `config.json` that comes with mpillm, for seeded random weights. `model_info` checks it for a run.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about, nearest
from mpillm.engine.dtypes import N_BYTES, STORED
from mpillm.engine.model.families import FAMILIES, Family
from mpillm.engine.weights.quantization import parse_quantization
from mpillm.files import read_object

PRESETS = Path(__file__).parent / "presets"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # of a model of the Hugging Face hub
# As safetensors names them
CHECKPOINT_DTYPES = {STORED[name]: name for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled for contexts longer than the model was first trained for."""

    kind: str = "default"  # default, linear or llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model: the fields of `config.json` that its tokens depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    family: Family = FAMILIES["LlamaForCausalLM"]
    sliding_window: int | None = None  # tokens that a token sees; None: all
    n_experts: int = 0  # 0: dense
    n_experts_per_token: int = 0
    quantization: str = "none"  # of the checkpoint: none, int8 or fp8
    kv_quantization: str = "none"  # fp8: the checkpoint has scales for the KV cache

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that is computed right: attention here sees all of them."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor that a checkpoint must have."""
        h, d = self.hidden_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, h),
            "model.norm.weight": (h,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        for i in range(self.n_layers):
            shapes |= {
                f"model.layers.{i}.input_layernorm.weight": (h,),
                f"model.layers.{i}.self_attn.q_proj.weight": (self.n_heads * d, h),
                f"model.layers.{i}.self_attn.k_proj.weight": (self.n_kv_heads * d, h),
                f"model.layers.{i}.self_attn.v_proj.weight": (self.n_kv_heads * d, h),
                f"model.layers.{i}.self_attn.o_proj.weight": (h, self.n_heads * d),
                f"model.layers.{i}.post_attention_layernorm.weight": (h,),
            }
            if self.family.qkv_bias:
                heads = {"q": self.n_heads, "k": self.n_kv_heads, "v": self.n_kv_heads}
                shapes |= {
                    f"model.layers.{i}.self_attn.{name}_proj.bias": (n * d,) for name, n in heads.items()
                }
            if self.family.qk_norm:
                shapes |= {f"model.layers.{i}.self_attn.{name}_norm.weight": (d,) for name in ("q", "k")}
            mlp = ("gate_proj", "up_proj", "down_proj")
            parts = [(f"model.layers.{i}.mlp", mlp)]
            if self.n_experts:
                shapes[f"model.layers.{i}.block_sparse_moe.gate.weight"] = (self.n_experts, h)
                parts = [
                    (f"model.layers.{i}.block_sparse_moe.experts.{e}", ("w1", "w3", "w2"))
                    for e in range(self.n_experts)
                ]
            for prefix, (gate, up, down) in parts:
                shapes[f"{prefix}.{gate}.weight"] = shapes[f"{prefix}.{up}.weight"] = (
                    self.intermediate_size,
                    h,
                )
                shapes[f"{prefix}.{down}.weight"] = (h, self.intermediate_size)
        return shapes

    def kv_bytes_per_token(self, dtype: str, tp_size: int = 1, pp_size: int = 1) -> int:
        """Return the bytes in a cache of `dtype` (float32, bfloat16, fp8), on the rank with the most."""
        layers, heads = -(-self.n_layers // pp_size), max(1, self.n_kv_heads // tp_size)
        return 2 * layers * heads * self.head_dim * N_BYTES[dtype]


def load_model_config(model_path: str) -> ModelConfig:
    """Return the model in a folder or of a preset. Raises ConfigError if it is missing or cannot run here."""
    source, _ = locate(model_path)
    raw = read_object(source)
    check_architecture(raw, source)
    return parse_model(raw, source)


def preset_json(name: str) -> dict[str, Any]:
    """Return a preset's `config.json`, parsed."""
    return read_object(PRESETS / f"{name}.json")


def presets() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.json"))


@about("model_path")
def locate(model_path: str) -> tuple[Path, Path | None]:
    """Return config.json and the folder (None for a preset); a folder wins over a preset of the same name."""
    folder = Path(model_path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model_path {model_path}: no model there: the folder has no config.json")
        return folder / "config.json", folder
    preset = PRESETS / f"{model_path}.json"
    if "/" not in model_path and preset.is_file():
        return preset, None
    if _HUB_ID.fullmatch(model_path):
        where = f"models/{folder.name}"
        raise ConfigError(
            f"--model_path {model_path}: no such folder; a model of the Hugging Face hub must be"
            f" fetched first: `hf download {model_path} --local-dir {where}` (pip install huggingface_hub),"
            f" then --model_path {where}"
        )
    known = presets()
    raise ConfigError(
        f"--model_path {model_path}: no such folder, and no such preset{nearest(model_path, known)};"
        f" presets: {', '.join(known)}"
    )


def check_architecture(raw: dict[str, Any], source: Path) -> None:
    """Raise ConfigError if the torch core does not support the architecture in `config.json`'s `raw`."""
    name = _architecture(raw)
    if name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError(
            f"{source}: architecture {name} is not supported by the torch core; supported: {supported}"
        )


def _architecture(raw: dict[str, Any]) -> str:
    return str((raw.get("architectures") or [raw.get("model_type")])[0])


def parse_model(raw: dict[str, Any], source: Path) -> ModelConfig:
    def number(name: str, default: float | None = None, where: dict[str, Any] = raw) -> float:
        value = where.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{source}: {name} is {json.dumps(value)}; must be a positive number")
        return value

    def integer(name: str, default: int | None = None) -> int:
        value = number(name, default)
        if not isinstance(value, int):
            raise ConfigError(f"{source}: {name} is {value}; must be an integer")
        return value

    for name, allowed in (
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("hidden_act", ("silu", None)),
        ("partial_rotary_factor", (1, None)),
    ):
        if raw.get(name) not in allowed:
            raise ConfigError(f"{source}: {name} {json.dumps(raw[name])} is not supported by the torch core")
    family = FAMILIES.get(_architecture(raw), Family())  # which the caller has checked
    window: int | None = None
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False:
        if not family.may_slide:
            raise ConfigError(
                f"{source}: sliding_window {json.dumps(raw['sliding_window'])} is not supported by the torch"
                f" core for {_architecture(raw)}"
            )
        window = integer("sliding_window")
    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    kv_heads = integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if raw.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ConfigError(
            f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads},"
            " and there is no head_dim"
        )
    head_dim = integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings turn pairs")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in CHECKPOINT_DTYPES.values():
        raise ConfigError(f"{source}: dtype {dtype} is not one of {', '.join(CHECKPOINT_DTYPES.values())}")
    # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = number("rope_theta", 10000.0, rope if "rope_theta" in rope else raw)
    quantization, kv_quantization = parse_quantization(raw, source)
    experts: dict[str, int] = {}
    if "num_local_experts" in raw:
        experts = {
            "n_experts": integer("num_local_experts"),
            "n_experts_per_token": integer("num_experts_per_tok", 2),
        }
        if experts["n_experts_per_token"] > experts["n_experts"]:
            raise ConfigError(
                f"{source}: num_experts_per_tok {experts['n_experts_per_token']}"
                f" of {experts['n_experts']} experts"
            )
    if bool(experts) != family.has_experts:
        said = "has" if experts else "has no"
        raise ConfigError(f"{source}: {_architecture(raw)} {said} num_local_experts")
    return ModelConfig(
        vocab_size=integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer("intermediate_size"),
        n_layers=integer("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=integer("max_position_embeddings", 2048),
        rms_norm_eps=number("rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(rope, source),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=dtype,
        family=family,
        sliding_window=window,
        quantization=quantization,
        kv_quantization=kv_quantization,
        **experts,
    )


def _rope_scaling(rope: dict[str, Any], source: Path) -> RopeScaling:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    names = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }.get(kind)
    if names is None:
        raise ConfigError(
            f"{source}: rope type {kind} is not supported by the torch core;"
            " supported: default, linear, llama3"
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"{source}: partial_rotary_factor {rope['partial_rotary_factor']}"
            " is not supported by the torch core"
        )
    missing = [name for name in names if not isinstance(rope.get(name), (int, float))]
    if missing:
        raise ConfigError(f"{source}: rope type {kind} needs {', '.join(missing)}")
    return RopeScaling(kind, **{name: rope[name] for name in names})
