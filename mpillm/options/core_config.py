"""What a core is built from. The engine reads it, too, so it is below both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpillm.options.fields import AllFields

# In `CoreConfig.options`, true or false: see `engine.kernels.sum_kernels` and `fp8_contexts`.
CUSTOM_ALL_REDUCE, FP8_CONTEXTS = CORE_OPTIONS = "use_custom_all_reduce", "use_fp8_context_fmha"


@dataclass(frozen=True)
class CoreConfig:
    """All that a core is built from: plain data, equal on the ranks of an instance except for coordinates."""

    core_type: str
    role: str = "executor"  # executor, context or generation
    instance: int = 0
    n_instances: int = 1  # of this role
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    rank: int = 0  # in the world, for messages
    device: int | None = None  # the GPU's index, as this process counts; None: runs on the CPU
    # free on that GPU, and on those of the instance's other ranks; None: runs on the CPU
    gpu_bytes: int | None = None
    n_threads: int = 1  # CPU threads that this rank may use
    model_path: str | None = None  # a folder, or the name of a preset
    load_format: str = AllFields.load_format.default  # auto: safetensors; dummy: seeded random weights
    dtype: str = AllFields.dtype.default  # auto: the checkpoint's; float32 or bfloat16
    # of linear layers. auto: the checkpoint's; none, int8 or fp8
    quantization: str = AllFields.quantization.default
    # auto: what the checkpoint has scales for, or dtype; bfloat16 or fp8
    kv_cache_dtype: str = AllFields.kv_cache_dtype.default
    # weights as each rank holds them (see `engine.weights.rank_weights`), instead of the checkpoint's
    engine_dir: str | None = None
    max_batch_size: int = 64
    max_num_tokens: int = 1024  # most tokens of one engine step
    max_seq_len: int | None = None  # prompt and answer; None: the model's
    kv_cache_tokens: int | None = None  # size of the KV cache; None: the core chooses
    # of what the model leaves of a GPU
    kv_cache_fraction: float = AllFields.kv_cache_free_gpu_mem_fraction.default
    tokens_per_block: int = AllFields.tokens_per_block.default
    enable_chunked_context: bool = AllFields.enable_chunked_context.default
    enable_max_num_tokens_tuning: bool = AllFields.enable_max_num_tokens_tuning.default
    context_chunking_policy: str = AllFields.context_chunking_policy.default  # or equal_progress
    batch_scheduler_policy: str = AllFields.batch_scheduler_policy.default  # or no_evict, static
    enable_kv_cache_reuse: bool = AllFields.enable_kv_cache_reuse.default
    speculative_config: Mapping[str, Any] | None = None  # see `engine.speculation`; None: no guesses
    beam_width: int = AllFields.beam_width.default
    end_ids: tuple[int, ...] | None = None  # None: the model's generation_config.json / config.json
    stop_words: tuple[str | tuple[int, ...], ...] = ()  # as text, or as tokens
    node_ranks: int = 1  # ranks of this node that hold a part of a model, this one included
    serves: bool = False  # requests come from HTTP clients: each fails alone, and latencies count
    # Of a client, the index of its server among those that the run owns; None: they are others'.
    server: int | None = None
    names_model: bool = False  # the run gives that server the model's name: see `ServerKind`
    # Of a client: the tokens of a prompt are the UTF-8 bytes of its text, and the server makes tokens of it
    sends_text: bool = False
    # Of a client of others' servers: for how long they may not be there; None: until --load_deadline
    server_wait_s: float | None = None
    # and for the first token of one that is up; None: a share of --health_deadline
    first_token_wait_s: float | None = None
    client: int = 0  # which of that server's clients it is
    n_clients: int = 1  # of that server
    server_restarts: bool = False  # it is started again if it is lost in the test
    context_servers: tuple[int, ...] = ()  # of the run, that compute contexts for it; see `handover`
    handover: str = ""  # how they hand KV caches over: see `cores.openai_client.disagg_protocol`
    options: dict[str, Any] = field(default_factory=dict)  # --core_options
    settings: Any = None  # what `LLMCore.settings` returned
