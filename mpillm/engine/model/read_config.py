"""Read the shape of a model from its `config.json`, without torch and without reading weights.

A model is a Hugging Face folder (`config.json`, `*.safetensors`, `generation_config.json`) or the name of a
preset: a `config.json` that comes with mpillm, for seeded random weights. `model_info` checks it for a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about, nearest
from mpillm.engine.dtypes import STORED
from mpillm.engine.model.families import FAMILIES, Family, Latent, Raw
from mpillm.engine.model.model_config import ModelConfig, RopeScaling
from mpillm.engine.weights.quantization import parse_quantization
from mpillm.files import as_written, check_files, excerpt, read_object

PRESETS = Path(__file__).parent / "presets"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # of a model of the Hugging Face hub
# Fields of config.json that may have these values only, None where they may be left out.
_FIXED: Raw = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1, None),
}
# A stranger's file must not ask for all memory. Experts: of all layers; the largest known have some 25,000.
_MOST, _MOST_LAYERS, _MOST_EXPERTS = 2**31 - 1, 10_000, 100_000
# As safetensors names them
CHECKPOINT_DTYPES = {STORED[name]: name for name in ("float32", "bfloat16", "float16")}


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


def is_preset(name: str) -> bool:
    """Return whether a preset has this name."""
    return "/" not in name and (PRESETS / f"{name}.json").is_file()


@about("model_path")
def locate(model_path: str) -> tuple[Path, Path | None]:
    """Return config.json and the folder (None for a preset). Raises ConfigError if there is neither."""
    folder = model_folder(model_path)
    if folder is None:
        return PRESETS / f"{model_path}.json", None
    check_files(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model_path {model_path}: no model there: the folder has no config.json")
    return folder / "config.json", folder


@about("model_path")
def model_folder(model_path: str) -> Path | None:
    """Return the folder that --model_path names; None for a preset, unless a folder has its name.

    Raises ConfigError if there is neither.
    """
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    if is_preset(model_path):
        return None
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
    name = architecture_of(raw)
    if name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError(
            f"{source}: architecture {name[:60]} is not supported by the torch core; supported: {supported}"
        )


def architecture_of(raw: Raw) -> str:
    """Return the name of the architecture in `config.json`'s `raw`."""
    names = raw.get("architectures") or [raw.get("model_type")]
    return str(names[0] if isinstance(names, list) else names)


def parse_model(raw: Raw, source: Path) -> ModelConfig:
    """Return the model in a `config.json`, `raw`. Raises ConfigError if it cannot run here."""
    with as_written(source, "no config.json of a model"):
        return _parsed(raw, source)


def _parsed(raw: Raw, source: Path) -> ModelConfig:
    def number(name: str, default: float | None = None, where: Raw | None = None) -> float:
        value = (raw if where is None else where).get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(
                f"{source}: {theirs.get(name, name)} is {excerpt(value)}; must be a positive number"
            )
        return value

    def integer(name: str, default: int | None = None) -> int:
        value = number(name, default)
        if not isinstance(value, int):
            raise ConfigError(f"{source}: {theirs.get(name, name)} is {value}; must be an integer")
        if value > _MOST:
            raise ConfigError(
                f"{source}: {theirs.get(name, name)} is {excerpt(value)}; must be {_MOST} at most"
            )
        return value

    name = architecture_of(raw)
    family = FAMILIES.get(name, Family())  # which the caller has checked
    theirs = {ours: field for field, ours in family.renames.items()}
    raw = {**family.defaults, **{family.renames.get(field, field): raw[field] for field in raw}}
    for field, allowed in {**_FIXED, **family.fixed}.items():
        if raw.get(field) not in allowed:
            raise ConfigError(
                f"{source}: {field} {excerpt(raw.get(field))} is not supported by the torch core"
            )
    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    kv_heads = 1 if family.latent else integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if raw.get("head_dim") is None and hidden % heads and not family.latent:
        raise ConfigError(
            f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads},"
            " and there is no head_dim"
        )
    latent = _latent(raw, integer, source) if family.latent else None
    head_dim = integer("head_dim", hidden // heads) if latent is None else latent.head_dim
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings turn pairs")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in CHECKPOINT_DTYPES.values():
        known = ", ".join(CHECKPOINT_DTYPES.values())
        raise ConfigError(f"{source}: dtype {dtype[:60]} is not one of {known}")
    n_layers = integer("num_hidden_layers")
    if n_layers > _MOST_LAYERS:
        raise ConfigError(f"{source}: num_hidden_layers is {n_layers}; must be {_MOST_LAYERS} at most")
    slides = _sliding_layers(raw, n_layers, family, source)
    # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    local_theta: float | None = None
    if family.local_rope:
        local = rope.get("sliding_attention") or {}
        _check_plain(local, source)
        rope = rope.get("full_attention", rope)
        local_theta = float(number("rope_theta", number("rope_local_base_freq"), local))
    theta = number("rope_theta", 10000.0, rope if "rope_theta" in rope else raw)
    quantized = parse_quantization(raw, source, family)
    n_experts = raw.get("num_local_experts", raw.get("num_experts"))
    if (n_experts is not None) != (family.experts is not None):
        said = "has" if n_experts is not None else "has no"
        raise ConfigError(f"{source}: {name} {said} num_local_experts")
    experts: dict[str, Any] = {}
    if n_experts is not None:
        count = "num_local_experts" if "num_local_experts" in raw else "num_experts"
        experts = {
            "n_experts": integer(count),
            "n_experts_per_token": integer("num_experts_per_tok", 2),
        }
        if (n := n_layers * experts["n_experts"]) > _MOST_EXPERTS:
            raise ConfigError(
                f"{source}: {theirs.get(count, count)} makes {n} experts in {n_layers} layers;"
                f" must be {_MOST_EXPERTS} at most"
            )
        if experts["n_experts_per_token"] > experts["n_experts"]:
            raise ConfigError(
                f"{source}: num_experts_per_tok {experts['n_experts_per_token']}"
                f" of {experts['n_experts']} experts"
            )
    scaled = "query_pre_attn_scalar" in family.defaults
    grouped: dict[str, Any] = {}
    if family.experts is not None and family.experts.grouped:
        grouped = {
            "groups": (integer("n_group"), integer("topk_group")),
            "routed_factor": float(number("routed_scaling_factor")),
            "n_dense_layers": integer("first_k_dense_replace") if raw["first_k_dense_replace"] else 0,
            "dense_size": integer("intermediate_size"),
            "shared_size": integer("n_shared_experts") * integer("moe_intermediate_size"),
        }
        n, chosen = grouped["groups"]
        in_groups = experts["n_experts"] // n * chosen
        if experts["n_experts"] % n or chosen > n or experts["n_experts_per_token"] > in_groups:
            raise ConfigError(
                f"{source}: {experts['n_experts']} experts in n_group {n}, of which topk_group {chosen}:"
                f" must be equal groups with {experts['n_experts_per_token']} experts to choose"
            )
    return ModelConfig(
        vocab_size=integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(
            family.experts.inner_size if family.experts is not None else "intermediate_size",
            None if family.is_gated else 4 * hidden,
        ),
        n_layers=n_layers,
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
        windows=tuple(integer("sliding_window") if slides[i] else 0 for i in range(n_layers))
        if any(slides)
        else (),
        local_rope_theta=local_theta,
        query_scalar=float(number("query_pre_attn_scalar")) if scaled else None,
        quantization=quantized.weights,
        kv_quantization=quantized.kv_cache,
        stored=quantized.stored,
        group=quantized.group,
        norms_choice=bool(raw.get("norm_topk_prob", True)),
        latent=latent,
        **experts,
        **grouped,
    )


def _latent(raw: Raw, integer: Callable[[str], int], source: Path) -> Latent:
    sizes = {name: integer(name) for name in Latent._fields[1:-1]}
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        if sizes[name] % 2:
            raise ConfigError(f"{source}: {name} {sizes[name]} is odd; rotary embeddings turn pairs")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    score_factor = 1.0
    if rope.get("rope_type", rope.get("type")) == "yarn" and rope.get("mscale_all_dim"):
        score_factor = _yarn_scale(_rope_scaling(rope, source).factor, rope["mscale_all_dim"]) ** 2
    rank = integer("q_lora_rank") if raw["q_lora_rank"] is not None else 0
    return Latent(rank, **sizes, score_factor=score_factor)


def _sliding_layers(raw: Raw, n_layers: int, family: Family, source: Path) -> list[bool]:
    """Return for each layer whether its tokens see the last `sliding_window` only."""
    if raw.get("sliding_window") is None or raw.get("use_sliding_window") is False:
        return [False] * n_layers
    if family.slides is None:
        raise ConfigError(
            f"{source}: sliding_window {excerpt(raw['sliding_window'])} is not supported by the torch"
            f" core for {architecture_of(raw)}"
        )
    if (types := raw.get("layer_types")) is None:
        return [family.slides(i, raw) for i in range(n_layers)]
    known = "full_attention", "sliding_attention"
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in known for kind in types):
        raise ConfigError(
            f"{source}: layer_types {excerpt(types)}: must name {' or '.join(known)}"
            f" for each of {n_layers} layers"
        )
    return [kind == "sliding_attention" for kind in types]


_ROPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # fields that a type needs, and may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (("factor", "original_max_position_embeddings"), ("beta_fast", "beta_slow", "attention_factor")),
}


def _rope_scaling(rope: Raw, source: Path) -> RopeScaling:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in _ROPES:
        raise ConfigError(
            f"{source}: rope type {kind[:60]} is not supported by the torch core;"
            f" supported: {', '.join(_ROPES)}"
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"{source}: partial_rotary_factor {excerpt(rope['partial_rotary_factor'])}"
            " is not supported by the torch core"
        )
    needed, others = _ROPES[kind]
    missing = [name for name in needed if not _is_number(rope.get(name))]
    if missing:
        raise ConfigError(f"{source}: rope type {kind} needs {', '.join(missing)}")
    given = {name: rope[name] for name in (*needed, *others) if rope.get(name) is not None}
    for name, value in given.items():
        if not _is_number(value) or not 0 < value < math.inf:
            raise ConfigError(f"{source}: {name} is {excerpt(value)}; must be a positive number")
    if kind != "yarn":
        return RopeScaling(kind, **given)
    for name in ("mscale", "mscale_all_dim"):
        if not _is_number(rope.get(name) or 0.0):
            raise ConfigError(f"{source}: {name} is {excerpt(rope[name])}; must be a number")
    if "attention_factor" not in given:
        # As the paper has it; DeepSeek's models weigh it against another one.
        more, all_ = (rope.get(name) for name in ("mscale", "mscale_all_dim"))
        given["attention_factor"] = _yarn_scale(given["factor"], 1)
        if more and all_:
            given["attention_factor"] = _yarn_scale(given["factor"], more) / _yarn_scale(
                given["factor"], all_
            )
    return RopeScaling(kind, **given, truncate=bool(rope.get("truncate", True)))


def _yarn_scale(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_plain(rope: Raw, source: Path) -> None:
    """Refuse a scaled rope where layers with a window have one of their own."""
    if (kind := _rope_scaling(rope, source).kind) != "default":
        raise ConfigError(
            f"{source}: rope type {kind} of sliding_attention is not supported by the torch core"
        )
