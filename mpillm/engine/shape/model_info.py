"""Read and check a model for a run, without torch and without reading its weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about, nearest
from mpillm.core_names import DEFAULT
from mpillm.data.tokenizer import load_tokenizer
from mpillm.engine.shape.checkpoint_folder import check_scales, checkpoint_files
from mpillm.engine.shape.dtypes import N_BYTES
from mpillm.engine.shape.eagle_config import EMBEDDING, EagleConfig, eagle_config
from mpillm.engine.shape.engine_config import CORE_OPTIONS, FP8_CONTEXTS, EngineConfig
from mpillm.engine.shape.engine_folder import EngineFolder, check_engine, read_engine
from mpillm.engine.shape.entries import BLOCK, int4_group, is_linear, rank_bytes
from mpillm.engine.shape.find_model import locate, presets
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.memory import (
    CacheBytes,
    GpuNeeds,
    cache_bytes,
    free_cache_bytes,
    gibibytes,
    gpu_needs,
    load_bytes,
    stages,
)
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.mtp_config import MtpConfig, mtp_config
from mpillm.engine.shape.quantization import TYPES, weight_type
from mpillm.engine.shape.read_config import check_architecture, parse_model, with_own_head
from mpillm.engine.shape.speculative_config import draft_config, max_rows
from mpillm.files import excerpt, read_object
from mpillm.telemetry.free_memory import available_bytes

_CHOICES = {
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", "float32", "bfloat16"),
    "quantization": ("auto", "none", *TYPES),
    "kv_cache_dtype": ("auto", "bfloat16", "fp8"),
    "batch_scheduler_policy": ("max_util", "no_evict", "static"),
    "context_chunking_policy": ("first_come_first_served", "equal_progress"),
}
_FP8_MULTIPLE = 16  # required by torch._scaled_mm for both sides of a matrix
_FP8_HEADS = 64, 128  # values of a head whose contexts are multiplied in fp8
_INT4_GROUP = 128  # of the product on GPUs
_DEFAULT_KV_BYTES = 2 << 30  # on a CPU


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model and its engine, for the rest of the program."""

    config: ModelConfig
    vocab_size: int
    max_seq_len: int  # tokens of prompt plus answer: the model's, the configured, or what the KV cache holds
    max_prompt_len: int | None  # tokens, if a prompt must be computed in one step
    end_ids: tuple[int, ...]
    stop_words: tuple[tuple[int, ...], ...]
    layout: RankLayout  # this rank's
    n_bytes: int  # of the weights on this rank, as the engine holds them
    dtype: str  # of weights that are not quantised: float32 or bfloat16
    kv_dtype: str  # of the KV cache: float32, bfloat16 or fp8
    quantization: str  # none or one of `TYPES`
    kv_cache_tokens: int  # size of the KV cache
    folder: Path | None  # None: a preset
    engine: EngineFolder | None = None  # source of the weights; None: no built engine
    head: EagleConfig | MtpConfig | None = None  # draft head
    feature_rows: int = 0  # rows of `Features`: of the largest step
    host_blocks: int = 0  # of the KV cache in each rank's host memory (see `HostBlocks`)
    window_cache_tokens: int = 0  # size of the KV cache of layers with a window; 0: they use the other one

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers whose outputs a draft head reads."""
        return () if self.head is None else self.head.layers


def check_model(config: EngineConfig) -> ModelInfo:
    """Return `model_info`; raise ConfigError also if the model does not fit in free memory.

    Call it before any rank loads.
    """
    info = model_info(config)
    if config.gpu_bytes is None:
        check_fit(config, info)
    _check_host_cache(config)
    return info


def _check_host_cache(config: EngineConfig) -> None:
    needed, available = int((config.kv_host_cache_gb or 0) * 1e9) * config.node_ranks, available_bytes()
    if needed > available:
        raise ConfigError(
            f"--kv_host_cache_gb {config.kv_host_cache_gb:g}: {config.node_ranks} ranks on this node need"
            f" {gibibytes(needed)}, and {gibibytes(available)} are available",
            about=["kv_host_cache_gb"],
        )


@about("model_path")
def check_fit(config: EngineConfig, info: ModelInfo, other_bytes: int = 0) -> int:
    """Return the bytes that the ranks of this node need for their parts of the model.

    Raises ConfigError if they do not fit beside `other_bytes` of other models. Call it before any rank loads.
    Assumes that nodes are alike, and that each rank holds as much as the largest rank of its instance.
    """
    weights = max(
        load_bytes(info.config, stage, info.dtype, info.quantization) for stage in stages(info.layout)
    )
    # A KV cache of a given size must fit as a whole. The default one is larger than one sequence, but takes
    # memory only as it is used.
    tokens = info.max_seq_len if config.kv_cache_tokens is None else info.kv_cache_tokens
    kv_cache = tokens * info.config.kv_bytes_per_token(info.kv_dtype, config.tp_size, config.pp_size)
    kind = info.dtype if info.quantization == "none" else info.quantization
    needed, available = (weights + kv_cache) * config.node_ranks, available_bytes() - other_bytes
    if needed > available:
        each, together = "it needs", ""
        if config.node_ranks > 1:
            each = f"each of the {config.node_ranks} ranks on this node needs"
            together = f", {gibibytes(needed)} together"
        raise ConfigError(
            f"{config.model_path} does not fit: {each} {gibibytes(weights + kv_cache)} of memory"
            f" ({gibibytes(weights)} to load the weights in {kind},"
            f" {gibibytes(kv_cache)} of KV cache for {tokens} tokens){together},"
            f" and {gibibytes(max(0, available))} are available"
            f"{f' beside {gibibytes(other_bytes)} of the model that it guesses for' if other_bytes else ''};"
            " spread it over more nodes (tensor or pipeline parallelism),"
            " or set a smaller --kv_cache_tokens or --max_seq_len",
            about=["kv_cache_tokens", "max_seq_len"],
        )
    return needed


@about("model_path")
def model_info(config: EngineConfig) -> ModelInfo:
    """Return the facts that are known before loading; read only JSON, safetensors headers and file sizes.

    The message of a ConfigError names the file, tensor or option. Causes: no such model, an unsupported
    architecture or field, a missing or truncated file, a missing tensor or a wrong shape, a layout that does
    not divide the model, a length that does not fit.
    """
    if not config.model_path:
        known = ", ".join(presets())
        raise ConfigError(
            f"--core_type {DEFAULT} needs --model_path: a folder, or one of {known}", about=["core_type"]
        )
    for name, allowed in _CHOICES.items():
        if (value := config.values[name]) not in allowed:
            raise ConfigError(
                f"--{name} {value}: not one of {', '.join(allowed)}{nearest(value, allowed)}", about=[name]
            )
    if config.beam_width != 1:
        raise ConfigError(
            f"--beam_width {config.beam_width}: must be 1; only requests to Triton may ask for more",
            about=["beam_width"],
        )
    for name in ("max_batch_size", "max_num_tokens", "tokens_per_block", "n_threads"):
        if config.values[name] < 1:
            raise ConfigError(f"{name} {config.values[name]}: must be at least 1", about=[name])
    _check_options(config)
    source, folder = locate(config.model_path)
    raw = read_object(source)
    check_architecture(raw, source)
    model = parse_model(raw, source)
    if config.load_format == "auto":
        model = with_own_head(model, folder)
    _check_layout(config, model)
    layout = RankLayout(config.tp_size, config.pp_size, config.ep_size, config.tp_rank, config.pp_rank)
    engine = None if config.engine_dir is None else read_engine(Path(config.engine_dir))
    if engine is not None:
        check_engine(
            engine,
            built := parse_model(engine.pretrained_config, engine.folder / "config.json"),
            config,
            model,
            folder,
        )
        model = dataclasses.replace(
            model,
            tie_word_embeddings=built.tie_word_embeddings,
            dtype=engine.dtype,
            quantization=engine.quantization,
            kv_quantization=engine.kv_quantization,
            stored="rows",
            group=engine.group,
        )
    elif folder is not None and config.load_format == "auto":
        check_scales(checkpoint_files(folder, model))
    # Never float16: float32 holds its values exactly.
    auto = "bfloat16" if model.dtype == "bfloat16" else "float32"
    dtype = auto if config.dtype == "auto" else config.dtype
    if config.quantization == "int4" and model.quantization == "none":
        model = dataclasses.replace(model, group=_INT4_GROUP)  # with which it is rounded
    quantization = _quantization(config, model, layout, dtype)
    kv_dtype = _kv_dtype(config, model, dtype)
    _check_fp8_contexts(config, model, quantization, kv_dtype)
    head = eagle_config(config, model) or mtp_config(config, raw, model, folder, quantization)
    cache, free_bytes = CacheBytes(model.kv_bytes_per_token(kv_dtype, config.tp_size, config.pp_size)), None
    if config.gpu_bytes is not None:
        needs = _gpu_needs(config, model, dtype, kv_dtype, quantization)
        if head is not None:
            needs += _head_needs(config, head, dtype)
        free_bytes = free_cache_bytes(config, needs, config.gpu_bytes)
        cache = cache_bytes(config, model, kv_dtype, needs.per_token)
    kv_cache_tokens, max_seq_len = _lengths(config, model, cache, free_bytes)
    window_cache_tokens = cache.window_cache_tokens(kv_cache_tokens)
    is_unlimited = config.scheduler.enable_chunked_context or config.role == "generation"
    return ModelInfo(
        config=model,
        vocab_size=model.vocab_size,
        max_seq_len=max_seq_len,
        max_prompt_len=None if is_unlimited else config.scheduler.max_num_tokens,
        end_ids=_end_ids(config, raw, folder),
        stop_words=_stop_words(config, model, folder),
        layout=layout,
        n_bytes=rank_bytes(model, layout, dtype, weight_type(quantization, config.gpu_bytes is not None)),
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        kv_cache_tokens=kv_cache_tokens,
        folder=folder,
        engine=engine,
        head=head,
        feature_rows=0 if head is None else max_rows(config),
        host_blocks=_host_blocks(config, model, kv_dtype, window_cache_tokens),
        window_cache_tokens=window_cache_tokens,
    )


def _check_layout(config: EngineConfig, model: ModelConfig) -> None:
    for name, count in (("attention heads", model.n_heads), ("KV heads", model.n_kv_heads)):
        if count % config.tp_size and config.tp_size % count:
            size = f"tensor_parallel_size {config.tp_size}"
            raise ConfigError(f"{size} does not divide the {count} {name} of {config.model_path}")
    if model.n_heads % config.tp_size:
        raise ConfigError(
            f"tensor_parallel_size {config.tp_size} does not divide the {model.n_heads} attention heads"
            f" of {config.model_path}"
        )
    if config.pp_size > model.n_layers:
        size = f"pipeline_parallel_size {config.pp_size}"
        raise ConfigError(f"{size} is more than the {model.n_layers} layers of {config.model_path}")
    if config.ep_size > 1:
        if not model.n_experts:
            raise ConfigError(
                f"moe_expert_parallel_size {config.ep_size}: {config.model_path} has no experts"
            )
        for name, count in (("tensor_parallel_size", config.tp_size), ("experts", model.n_experts)):
            if count % config.ep_size:
                size = f"moe_expert_parallel_size {config.ep_size}"
                raise ConfigError(f"{size} does not divide the {count} {name} of {config.model_path}")


@about("quantization")
def _check_options(config: EngineConfig) -> None:
    for name, value in config.core_options.items():
        wrong = None
        if name not in CORE_OPTIONS:
            wrong = f"{name}: the torch core has no such option{nearest(name, CORE_OPTIONS)}"
        elif not isinstance(value, bool):
            wrong = f"{name}:{value}: not true or false"
        elif value and config.gpu_bytes is None:
            wrong = f"{name}:{value}: only for GPUs"
        if wrong is not None:
            raise ConfigError(f"--core_options {wrong}", about=["core_options"])


def _check_fp8_contexts(config: EngineConfig, model: ModelConfig, quantization: str, kv_dtype: str) -> None:
    if not config.core_options.get(FP8_CONTEXTS):
        return
    wrong = None
    if (quantization, kv_dtype) != ("fp8", "fp8"):
        wrong = f"only with weights and a KV cache in fp8; they are in {quantization} and {kv_dtype}"
    elif model.latent is not None or model.head_dim not in _FP8_HEADS:
        wrong = f"only for heads of {' or '.join(map(str, _FP8_HEADS))} values"
    if wrong is not None:
        raise ConfigError(f"--core_options {FP8_CONTEXTS}:True: {wrong}", about=["core_options"])


def _quantization(config: EngineConfig, model: ModelConfig, layout: RankLayout, dtype: str) -> str:
    """Return the engine's quantization: the checkpoint's, or that to apply at load to an unquantized one."""
    why_floats = _why_floats(config, model, layout, dtype)
    if config.quantization == "auto":
        quantization = model.quantization
        if model.stored == "mxfp4" and why_floats is None:
            quantization = "mxfp4"
    elif model.quantization in ("none", config.quantization):
        quantization = config.quantization
    else:
        option = f"--quantization {config.quantization}"
        raise ConfigError(f"{option}: the weights of {config.model_path} are {model.quantization}")
    if quantization == "mxfp4" and why_floats is not None:
        raise ConfigError(f"{config.model_path}: its experts can't be in MXFP4: {why_floats}")
    if quantization == "int4" and (model.n_experts or model.latent is not None):
        raise ConfigError(f"{config.model_path}: int4 is only for dense models without latent attention")
    for name, shape in layout.shapes(model).items() if quantization == "int4" else ():
        if is_linear(name) and shape[1] % (group := int4_group(model)):
            raise ConfigError(
                f"{config.model_path}: with tensor_parallel_size {config.tp_size} a rank holds"
                f" {shape[1]} inputs of {name}; int4 needs multiples of its group, {group}"
            )
    if config.gpu_bytes is None:
        return quantization
    if quantization == "int8":
        raise ConfigError(
            f"{config.model_path}: int8 weights run only on CPUs (--device cpu); on a GPU use fp8",
            about=["device"],
        )
    if quantization == "int4" and (dtype != "bfloat16" or int4_group(model) != _INT4_GROUP):
        raise ConfigError(
            f"{config.model_path}: int4 weights run on GPUs in bfloat16 (--dtype bfloat16) and with"
            f" group_size {_INT4_GROUP} or -1; here {dtype} and {model.group}",
            about=["dtype"],
        )
    for name, shape in layout.shapes(model).items() if quantization == "fp8" else ():
        if is_linear(name) and any(n % _FP8_MULTIPLE for n in shape):
            raise ConfigError(
                f"{config.model_path}: with tensor_parallel_size {config.tp_size}"
                f" a rank holds {list(shape)} of {name};"
                f" fp8 products on a GPU need multiples of {_FP8_MULTIPLE}"
            )
    return quantization


def _why_floats(config: EngineConfig, model: ModelConfig, layout: RankLayout, dtype: str) -> str | None:
    """Return why a model's experts cannot be MXFP4 in memory; None if they can."""
    if not model.n_experts:
        return "it has none"
    if config.gpu_bytes is not None and dtype != "bfloat16":
        return f"on a GPU they multiply bfloat16, not {dtype}"
    n_parts = layout.tp_size // layout.ep_size  # of each expert
    for size, n in ((model.hidden_size, 1), (model.intermediate_size, n_parts)):
        if size % (n * BLOCK):
            return f"{size} numbers in {n} parts of a multiple of {BLOCK}"
    return None


def _kv_dtype(config: EngineConfig, model: ModelConfig, dtype: str) -> str:
    """Return the KV cache's type: as configured, or fp8 if the checkpoint has scales, or the weights'."""
    kv_dtype = config.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = dtype if model.kv_quantization == "none" else model.kv_quantization
    if kv_dtype == "fp8" and config.gpu_bytes is not None and model.head_dim % _FP8_MULTIPLE:
        raise ConfigError(
            f"--kv_cache_dtype fp8: heads of {config.model_path} have {model.head_dim} values;"
            f" on a GPU fp8 needs a multiple of {_FP8_MULTIPLE}",
            about=["kv_cache_dtype"],
        )
    return kv_dtype


def _gpu_needs(
    config: EngineConfig, model: ModelConfig, dtype: str, kv_dtype: str, quantization: str
) -> GpuNeeds:
    """Return the memory that the model, with its draft model if there is one, needs of each GPU."""
    needs = gpu_needs(config, model, dtype, kv_dtype, weight_type(quantization, on_gpu=True))
    if (drafting := draft_config(config)) is not None:
        draft = model_info(drafting)
        needs += _gpu_needs(drafting, draft.config, draft.dtype, draft.kv_dtype, draft.quantization)
    return needs


def _head_needs(config: EngineConfig, head: EagleConfig | MtpConfig, dtype: str) -> GpuNeeds:
    """Return the memory that a draft head needs beside the model, on the head's only rank.

    It includes an embedding, which is larger than the head's `fc`.
    """
    n_ranks = config.tp_size
    config = dataclasses.replace(config, tp_size=1, ep_size=1)
    quantization = weight_type(head.quantization, on_gpu=True) if isinstance(head, MtpConfig) else "none"
    needs, hidden_state = gpu_needs(config, head.model, dtype, dtype, quantization), head.model.hidden_size
    hidden_state *= N_BYTES[dtype]
    rows = (len(head.layers) + 3) * max_rows(config)
    # The head's own embedding, or the whole of the model's, of which each of several ranks has a part.
    has_embedding = n_ranks > 1 or (isinstance(head, EagleConfig) and EMBEDDING in head.names)
    embedding = head.vocab_size * hidden_state if has_embedding else 0
    # There is a hidden state for each token in the KV cache.
    return needs + GpuNeeds(weights=embedding, step=rows * hidden_state, per_token=hidden_state)


def _lengths(
    config: EngineConfig, model: ModelConfig, cache: CacheBytes, gpu_bytes: int | None
) -> tuple[int, int]:
    """Return the number of tokens in the KV cache, and the length of the longest sequence.

    `cache`: the bytes that the cache takes. On a GPU, `gpu_bytes` are free for it.
    """
    max_seq_len = config.max_seq_len
    if max_seq_len is not None and not 1 <= max_seq_len <= model.max_position_embeddings:
        raise ConfigError(
            f"max_seq_len {max_seq_len}: {config.model_path} allows 1 to {model.max_position_embeddings}",
            about=["max_seq_len"],
        )
    longest = max_seq_len or model.max_position_embeddings
    block = config.scheduler.tokens_per_block
    tokens_per_sequence = -(-longest // block) * block
    most = config.scheduler.max_batch_size * tokens_per_sequence
    if config.kv_cache_tokens is None and gpu_bytes is None:
        capacity = max(longest, cache.tokens_in(_DEFAULT_KV_BYTES))
        return -(-min(capacity, most) // block) * block, longest
    size = config.kv_cache_tokens
    if size is None:
        assert gpu_bytes is not None
        fits = cache.tokens_in(int(config.kv_cache_free_gpu_mem_fraction * gpu_bytes))
        size = min(fits, most + block)
    elif gpu_bytes is not None and cache.of(size) > gpu_bytes:
        needed = f"a KV cache of {size} tokens needs {gibibytes(cache.of(size))} on a GPU"
        raise ConfigError(f"{needed}, and the model leaves {gibibytes(gpu_bytes)}", about=["kv_cache_tokens"])
    tokens = size // block * block
    option = "" if config.kv_cache_tokens is None else f"--kv_cache_tokens {size}: "
    if tokens == 0 or (max_seq_len is not None and max_seq_len > tokens):
        raise ConfigError(
            f"{option}a KV cache of {size} tokens (blocks of {block})"
            f" does not hold one sequence of {max_seq_len or longest} tokens",
            about=["kv_cache_tokens", "max_seq_len"],
        )
    return tokens, min(longest, tokens)


def _host_blocks(config: EngineConfig, model: ModelConfig, kv_dtype: str, window_cache_tokens: int) -> int:
    if config.kv_host_cache_gb is None or config.role == "generation":  # which looks up no prompts
        return 0
    option = f"--kv_host_cache_gb {config.kv_host_cache_gb:g}"
    if window_cache_tokens:
        raise ConfigError(
            f"{option}: {config.model_path} has layers with a window, and their KV cache keeps no blocks in"
            " host memory",
            about=["kv_host_cache_gb"],
        )
    size = config.scheduler.tokens_per_block
    block_bytes = size * model.kv_bytes_per_token(kv_dtype, config.tp_size, config.pp_size)
    n_blocks = int(config.kv_host_cache_gb * 1e9) // block_bytes
    if not n_blocks:
        raise ConfigError(
            f"{option}: a block of {size} tokens needs {block_bytes / 1e9:.3g} GB", about=["kv_host_cache_gb"]
        )
    return n_blocks


def _end_ids(config: EngineConfig, raw: dict[str, Any], folder: Path | None) -> tuple[int, ...]:
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
        where = folder / file if folder else file
        raise ConfigError(f"{where}: eos_token_id {excerpt(value)}: must be a token id or an array of them")
    return tuple(ids)


@about("stop_words")
def _stop_words(config: EngineConfig, model: ModelConfig, folder: Path | None) -> tuple[tuple[int, ...], ...]:
    """Return each stop word as tokens; the model's tokenizer encodes only the text."""
    texts = [word for word in config.stop_words if isinstance(word, str)]
    tokenizer = load_tokenizer(folder, apply_chat_template=False) if texts else None
    words = []
    for word in config.stop_words:
        tokens = tuple(
            tokenizer.encode_plain(word) if isinstance(word, str) and tokenizer else map(int, word)
        )
        if not tokens or not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
            allowed = f"one or more, each from 0 to {model.vocab_size - 1}"
            raise ConfigError(f"--stop_words {word!r}: tokens {list(tokens)}; must be {allowed}")
        words.append(tokens)
    return tuple(words)
