"""What a model is, and everything that can be wrong with it, found without torch and without reading a weight.

A model is a Hugging Face folder (`config.json`, `*.safetensors`, `generation_config.json`) or the name of a preset: a `config.json`
of ours that runs with seeded random weights.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.cores.base import CoreConfig
from mpillm.engine.checkpoint_folder import read_header, weight_files
from mpillm.engine.engine_folder import EngineFolder, check_engine, read_engine
from mpillm.engine.layout import Layout
from mpillm.engine.memory import check_fit, gpu_room, shown
from mpillm.engine.quantization import ALGORITHMS, DTYPES, held, is_linear, parse_quantization, scale_name
from mpillm.json_files import read_object
from mpillm.tokenizer import load_tokenizer

PRESETS = Path(__file__).parent / "presets"
SUPPORTED = ("LlamaForCausalLM", "MixtralForCausalLM")
_CHOICES = {
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", "float32", "bfloat16"),
    "quantization": ("auto", "none", *ALGORITHMS),
    "batch_scheduler_policy": ("max_util", "no_evict", "static"),
    "context_chunking_policy": ("first_come_first_served", "equal_progress"),
}
_CHECKPOINT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FP8_MULTIPLE = 16  # torch._scaled_mm's rule, for both sides of a matrix
_DEFAULT_KV_BYTES = 2 << 30  # on a CPU


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the model was first trained for."""

    kind: str = "default"  # default, linear or llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama or Mixtral: the fields of `config.json` that decide its tokens."""

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
    n_experts: int = 0  # 0: dense
    n_experts_per_token: int = 0
    quantization: str = "none"  # of the checkpoint: none, int8 or fp8

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must have."""
        h, d = self.hidden_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h), "model.norm.weight": (h,)}
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
            mlp = ("gate_proj", "up_proj", "down_proj")
            parts = [(f"model.layers.{i}.mlp", mlp)]
            if self.n_experts:
                shapes[f"model.layers.{i}.block_sparse_moe.gate.weight"] = (self.n_experts, h)
                parts = [(f"model.layers.{i}.block_sparse_moe.experts.{e}", ("w1", "w3", "w2")) for e in range(self.n_experts)]
            for prefix, (gate, up, down) in parts:
                shapes[f"{prefix}.{gate}.weight"] = shapes[f"{prefix}.{up}.weight"] = (self.intermediate_size, h)
                shapes[f"{prefix}.{down}.weight"] = (h, self.intermediate_size)
        return shapes

    def kv_bytes_per_token(self, dtype: str, tp_size: int = 1, pp_size: int = 1) -> int:
        """On the rank that holds the most."""
        layers, heads = -(-self.n_layers // pp_size), max(1, self.n_kv_heads // tp_size)
        return 2 * layers * heads * self.head_dim * (4 if dtype == "float32" else 2)


@dataclass(frozen=True)
class ModelInfo:
    """What the rest of the program wants to know of a model, and what the engine was decided to be."""

    architecture: str
    config: ModelConfig
    vocab_size: int
    max_seq_len: int  # prompt and answer, of this instance: the model's, the configured, or what the KV cache holds
    max_prompt_len: int | None  # of one that must be computed in one step
    n_layers: int
    n_heads: int
    n_kv_heads: int
    end_ids: tuple[int, ...]
    stop_words: tuple[tuple[int, ...], ...]
    layout: Layout  # this rank's
    n_bytes: int  # of the weights on this rank, as the engine holds them
    dtype: str  # of weights, but those that are quantised, and of the KV cache: float32 or bfloat16
    quantization: str  # none, int8 or fp8
    kv_cache_tokens: int  # size of the KV cache
    folder: Path | None  # None: a preset
    engine: EngineFolder | None = None  # that the weights come from


def check_model(config: CoreConfig) -> ModelInfo:
    """As `model_info`, and ConfigError if the model does not fit the memory that is there now: so before any rank loads."""
    info = model_info(config)
    if config.gpu_bytes is None:
        check_fit(config, info)
    return info


def model_info(config: CoreConfig) -> ModelInfo:
    """Everything that can be known before loading; reads JSON, safetensors headers and file sizes only.

    ConfigError names the file, tensor or option: no such model, an unsupported architecture or field, a missing or truncated file,
    a missing tensor or a wrong shape, a layout that does not divide the model, a length that does not fit.
    """
    if not config.model_path:
        raise ConfigError(f"--core_type {config.core_type} needs --model_path: a folder, or one of {', '.join(_presets())}")
    for name, allowed in _CHOICES.items():
        if (value := getattr(config, name)) not in allowed:
            raise ConfigError(f"--{name} {value}: not one of {', '.join(allowed)}{nearest(value, allowed)}")
    if config.beam_width != 1:
        raise ConfigError(f"--beam_width {config.beam_width}: the torch core has no beam search, only 1 is supported")
    if config.options:
        raise ConfigError(f"--core_options {', '.join(config.options)}: the torch core has no such options")
    source, folder = _locate(config.model_path)
    raw = read_object(source)
    architecture = _architecture(raw, source)
    model = _parse(raw, source)
    _check_layout(config, model)
    layout = Layout(config.tp_size, config.pp_size, config.ep_size, config.tp_rank, config.pp_rank)
    engine = None if config.engine_dir is None else read_engine(Path(config.engine_dir))
    if engine is not None:
        check_engine(engine, _parse(engine.pretrained_config, engine.folder / "config.json"), config, model, folder)
        model = dataclasses.replace(model, dtype=engine.dtype, quantization=engine.quantization)
    elif folder is not None and config.load_format == "auto":
        checkpoint_files(folder, model)
    # float16 has no place here: its values are held as float32, which keeps them exactly.
    auto = "bfloat16" if model.dtype == "bfloat16" else "float32"
    dtype = auto if config.dtype == "auto" else config.dtype
    quantization = _quantization(config, model, layout)
    weights_held = held(quantization, config.gpu_bytes is not None)
    room = None if config.gpu_bytes is None else gpu_room(config, model, dtype, weights_held, config.gpu_bytes)
    kv_cache_tokens, max_seq_len = _lengths(config, model, dtype, room)
    return ModelInfo(
        architecture=architecture,
        config=model,
        vocab_size=model.vocab_size,
        max_seq_len=max_seq_len,
        max_prompt_len=None if config.enable_chunked_context or config.role == "generation" else config.max_num_tokens,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        end_ids=_end_ids(config, raw, folder),
        stop_words=_stop_words(config, model, folder),
        layout=layout,
        n_bytes=layout.n_bytes(model, 4 if dtype == "float32" else 2, weights_held),
        dtype=dtype,
        quantization=quantization,
        kv_cache_tokens=kv_cache_tokens,
        folder=folder,
        engine=engine,
    )


def load_model_config(model_path: str) -> ModelConfig:
    """The model in a folder or of a preset; ConfigError if there is none or we cannot run it."""
    source, _ = _locate(model_path)
    raw = read_object(source)
    _architecture(raw, source)
    return _parse(raw, source)


def preset_json(name: str) -> dict[str, Any]:
    """The `config.json` of a preset."""
    return read_object(PRESETS / f"{name}.json")


def checkpoint_files(folder: Path, model: ModelConfig) -> dict[str, Path]:
    """The file of every tensor of `model`; ConfigError if one is missing, truncated, of the wrong shape or of a type we cannot read."""
    files = weight_files(folder)
    found = {name: (file, entry) for file in files for name, entry in read_header(file).items()}
    expected = {name: (shape, tuple(_CHECKPOINT_DTYPES)) for name, shape in model.tensors().items()}
    if model.quantization != "none":
        for name in [name for name in expected if is_linear(name)]:
            shape, floats = expected[name]
            expected[name] = shape, (DTYPES[model.quantization],)
            expected[scale_name(name)] = (shape[0], 1), floats
    for name, (shape, dtypes) in expected.items():
        if name not in found:
            raise ConfigError(f"{folder}: no tensor {name} in {', '.join(file.name for file in files)}")
        file, entry = found[name]
        if tuple(entry["shape"]) != shape:
            raise ConfigError(f"{file}: tensor {name} has shape {list(entry['shape'])}, config.json makes it {list(shape)}")
        if entry["dtype"] not in dtypes:
            raise ConfigError(f"{file}: tensor {name} is of type {entry['dtype']}; can read {', '.join(dtypes)}")
    return {name: found[name][0] for name in expected}


def _presets() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.json"))


def _locate(model_path: str) -> tuple[Path, Path | None]:
    """config.json and the folder (None for a preset); a folder wins over a preset of the same name."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder / "config.json", folder
    preset = PRESETS / f"{model_path}.json"
    if "/" not in model_path and preset.is_file():
        return preset, None
    known = _presets()
    raise ConfigError(
        f"--model_path {model_path}: no such folder, and no such preset{nearest(model_path, known)}; presets: {', '.join(known)}"
    )


def _architecture(raw: dict[str, Any], source: Path) -> str:
    names = raw.get("architectures") or [str(raw.get("model_type"))]
    if names[0] not in SUPPORTED:
        raise ConfigError(f"{source}: architecture {names[0]} is not supported by the torch core; supported: {', '.join(SUPPORTED)}")
    return str(names[0])


def _parse(raw: dict[str, Any], source: Path) -> ModelConfig:
    def number(name: str, default: float | None = None) -> float:
        value = raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError(f"{source}: {name} is {json.dumps(value)}, a positive number is needed")
        return value

    def integer(name: str, default: int | None = None) -> int:
        value = number(name, default)
        if not isinstance(value, int):
            raise ConfigError(f"{source}: {name} is {value}, an integer is needed")
        return value

    for name, allowed in (
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("hidden_act", ("silu", None)),
        ("sliding_window", (None,)),
        ("partial_rotary_factor", (1, None)),
    ):
        if raw.get(name) not in allowed:
            raise ConfigError(f"{source}: {name} {json.dumps(raw[name])} is not supported by the torch core")
    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    kv_heads = integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if raw.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim")
    head_dim = integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings turn pairs")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in _CHECKPOINT_DTYPES.values():
        raise ConfigError(f"{source}: dtype {dtype} is not one of {', '.join(_CHECKPOINT_DTYPES.values())}")
    # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    experts: dict[str, int] = {}
    if "num_local_experts" in raw:
        experts = {"n_experts": integer("num_local_experts"), "n_experts_per_token": integer("num_experts_per_tok", 2)}
        if experts["n_experts_per_token"] > experts["n_experts"]:
            raise ConfigError(f"{source}: num_experts_per_tok {experts['n_experts_per_token']} of {experts['n_experts']} experts")
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
        quantization=parse_quantization(raw, source),
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
        raise ConfigError(f"{source}: rope type {kind} is not supported by the torch core; supported: default, linear, llama3")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"{source}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported by the torch core")
    missing = [name for name in names if not isinstance(rope.get(name), (int, float))]
    if missing:
        raise ConfigError(f"{source}: rope type {kind} needs {', '.join(missing)}")
    return RopeScaling(kind, **{name: rope[name] for name in names})


def _check_layout(config: CoreConfig, model: ModelConfig) -> None:
    for name, count in (("attention heads", model.n_heads), ("KV heads", model.n_kv_heads)):
        if count % config.tp_size and config.tp_size % count:
            raise ConfigError(f"tensor_parallel_size {config.tp_size} does not divide the {count} {name} of {config.model_path}")
    if model.n_heads % config.tp_size:
        raise ConfigError(
            f"tensor_parallel_size {config.tp_size} does not divide the {model.n_heads} attention heads of {config.model_path}"
        )
    if config.pp_size > model.n_layers:
        raise ConfigError(f"pipeline_parallel_size {config.pp_size} is more than the {model.n_layers} layers of {config.model_path}")
    if config.ep_size > 1:
        if not model.n_experts:
            raise ConfigError(f"moe_expert_parallel_size {config.ep_size}: {config.model_path} has no experts")
        for name, count in (("tensor_parallel_size", config.tp_size), ("experts", model.n_experts)):
            if count % config.ep_size:
                raise ConfigError(f"moe_expert_parallel_size {config.ep_size} does not divide the {count} {name} of {config.model_path}")


def _quantization(config: CoreConfig, model: ModelConfig, layout: Layout) -> str:
    """What the engine's weights are quantised by: the checkpoint's algorithm, or what a checkpoint of floats is rounded to at load."""
    if config.quantization == "auto":
        quantization = model.quantization
    elif model.quantization in ("none", config.quantization):
        quantization = config.quantization
    else:
        raise ConfigError(f"--quantization {config.quantization}: the weights of {config.model_path} are {model.quantization}")
    if config.gpu_bytes is None:
        return quantization
    if quantization == "int8":
        raise ConfigError(f"{config.model_path}: int8 weights run on CPUs alone (--device cpu); on a GPU use fp8")
    for name in layout.tensors(model) if quantization == "fp8" else ():
        if is_linear(name):
            shape = [len(range(n)[part]) for n, part in zip(model.tensors()[name], layout.part(name, model), strict=True)]
            if any(n % _FP8_MULTIPLE for n in shape):
                raise ConfigError(
                    f"{config.model_path}: with tensor_parallel_size {config.tp_size} a rank holds {shape} of {name};"
                    f" fp8 products on a GPU need multiples of {_FP8_MULTIPLE}"
                )
    return quantization


def _lengths(config: CoreConfig, model: ModelConfig, dtype: str, gpu_room: int | None) -> tuple[int, int]:
    """Tokens in the KV cache, and the longest sequence. A cache on a GPU has `gpu_room` bytes, a fraction of them by default."""
    for name in ("max_batch_size", "max_num_tokens", "tokens_per_block", "n_threads"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} {getattr(config, name)}: at least 1 is needed")
    wanted = config.max_seq_len
    if wanted is not None and not 1 <= wanted <= model.max_position_embeddings:
        raise ConfigError(f"max_seq_len {wanted}: {config.model_path} allows 1 to {model.max_position_embeddings}")
    longest = wanted or model.max_position_embeddings
    block = config.tokens_per_block
    per_token = model.kv_bytes_per_token(dtype, config.tp_size, config.pp_size)
    if config.kv_cache_tokens is None and gpu_room is None:
        room = max(longest, _DEFAULT_KV_BYTES // per_token)
        return -(-min(room, config.max_batch_size * longest) // block) * block, longest
    size = config.kv_cache_tokens
    if size is None:
        assert gpu_room is not None
        size = min(int(config.kv_cache_fraction * gpu_room) // per_token, config.max_batch_size * longest + block)
    elif gpu_room is not None and size * per_token > gpu_room:
        raise ConfigError(f"a KV cache of {size} tokens needs {shown(size * per_token)} on a GPU, and the model leaves {shown(gpu_room)}")
    tokens = size // block * block
    given = "" if config.kv_cache_tokens is None else f"--kv_cache_tokens {size}: "
    if tokens == 0 or (wanted is not None and wanted > tokens):
        raise ConfigError(
            f"{given}a KV cache of {size} tokens (blocks of {block}) does not hold one sequence of {wanted or longest} tokens"
        )
    return tokens, min(longest, tokens)


def _end_ids(config: CoreConfig, raw: dict[str, Any], folder: Path | None) -> tuple[int, ...]:
    if config.end_ids is not None:
        return config.end_ids
    value, file = None, "generation_config.json"
    if folder is not None and (folder / file).is_file():
        value = read_object(folder / file).get("eos_token_id")
    if value is None:
        value, file = raw.get("eos_token_id"), "config.json"
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigError(
            f"{folder / file if folder else file}: eos_token_id {json.dumps(value)}: a token id or an array of them is needed"
        )
    return tuple(ids)


def _stop_words(config: CoreConfig, model: ModelConfig, folder: Path | None) -> tuple[tuple[int, ...], ...]:
    """Each as tokens; a text becomes what the model's tokenizer makes of it alone."""
    texts = [word for word in config.stop_words if isinstance(word, str)]
    tokenizer = load_tokenizer(folder, apply_chat_template=False) if texts else None
    words = []
    for word in config.stop_words:
        tokens = tuple(tokenizer.encode_plain(word)) if isinstance(word, str) and tokenizer else tuple(int(t) for t in word)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
            raise ConfigError(
                f"--stop_words {word!r}: tokens {list(tokens)}; at least one is needed, and all from 0 to {model.vocab_size - 1}"
            )
        words.append(tokens)
    return tuple(words)
