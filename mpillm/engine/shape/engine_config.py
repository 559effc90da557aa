"""Configuration of an engine: plain data, equal on the ranks of an instance except for coordinates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpillm.options.fields import AllFields

# In `EngineConfig.core_options`, true or false: see `engine.kernels.sum_kernels` and `fp8_contexts`.
CUSTOM_ALL_REDUCE, FP8_CONTEXTS = CORE_OPTIONS = "use_custom_all_reduce", "use_fp8_context_fmha"


@dataclass(frozen=True)
class SchedulerConfig:
    """How many tokens of which sequences an engine computes in a step; fields are named as the options."""

    max_batch_size: int = 64
    max_num_tokens: int = 1024  # of one step
    tokens_per_block: int = AllFields.tokens_per_block.default
    enable_chunked_context: bool = AllFields.enable_chunked_context.default
    batch_scheduler_policy: str = AllFields.batch_scheduler_policy.default  # or no_evict, static
    context_chunking_policy: str = AllFields.context_chunking_policy.default  # or equal_progress
    # Share the blocks of a common prefix.
    enable_kv_cache_reuse: bool = AllFields.enable_kv_cache_reuse.default
    # of generation instances: new tokens of later turns that they compute themselves, at most; 0: none
    max_local_prefill_length: int = AllFields.max_local_prefill_length.default


@dataclass(frozen=True)
class EngineConfig:
    """A model, its types, its memory, and the coordinates of a rank that holds a part of the model."""

    scheduler: SchedulerConfig = SchedulerConfig()
    model_path: str | None = None  # a folder, or the name of a preset
    load_format: str = AllFields.load_format.default  # auto: safetensors; dummy: seeded random weights
    dtype: str = AllFields.dtype.default  # auto: the checkpoint's; float32 or bfloat16
    # of linear layers. auto: the checkpoint's; none, int8 or fp8
    quantization: str = AllFields.quantization.default
    # auto: fp8 if the checkpoint has scales for it, otherwise dtype; bfloat16 or fp8
    kv_cache_dtype: str = AllFields.kv_cache_dtype.default
    # built engine: weights as each rank holds them (see `engine.weights.rank_weights`), instead of the
    # checkpoint's
    engine_dir: str | None = None
    max_seq_len: int | None = None  # prompt and answer; None: the model's
    kv_cache_tokens: int | None = None  # size of the KV cache; None: the core chooses
    # of the GPU memory that the model leaves
    kv_cache_free_gpu_mem_fraction: float = AllFields.kv_cache_free_gpu_mem_fraction.default
    kv_host_cache_gb: float | None = None  # of each rank's host memory, behind the KV cache
    enable_max_num_tokens_tuning: bool = AllFields.enable_max_num_tokens_tuning.default
    speculative_config: Mapping[str, Any] | None = None  # see `engine.speculation`; None: no draft tokens
    acceptance_length: float | None = None  # see `engine.speculation.fixed_acceptance`; None: as computed
    beam_width: int = AllFields.beam_width.default
    end_ids: tuple[int, ...] | None = None  # None: the model's generation_config.json / config.json
    stop_words: tuple[str | tuple[int, ...], ...] = ()  # as text, or as tokens
    core_options: dict[str, Any] = field(default_factory=dict)
    # The following fields are not options.
    role: str = "executor"  # executor, context or generation
    instance: int = 0
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    gpu: int | None = None  # its index, as this process counts; None: runs on the CPU
    # bytes free on that GPU, and on each GPU of the instance's other ranks; None: runs on the CPU
    gpu_bytes: int | None = None
    n_threads: int = 1  # CPU threads that this rank may use
    node_ranks: int = 1  # ranks of this node that hold a part of a model, this one included

    @property
    def values(self) -> dict[str, Any]:
        """All values by name, including the scheduler's."""
        return {**vars(self), **vars(self.scheduler)}

    @classmethod
    def of(cls, values: Mapping[str, Any], **place: Any) -> EngineConfig:
        """Return the configuration of an engine with these values of options.

        Args:
            values: By name. None is a field's default; other names have no effect.
            place: Fields that are not options.
        """
        scheduler = SchedulerConfig(**_explicit(values, SchedulerConfig))
        return cls(**{**_explicit(values, cls), "scheduler": scheduler, **place})


def _explicit(values: Mapping[str, Any], kind: type[SchedulerConfig | EngineConfig]) -> dict[str, Any]:
    names = [each.name for each in dataclasses.fields(kind)]
    return {name: _frozen(values[name]) for name in names if values.get(name) is not None}


def _frozen(value: Any) -> Any:
    """Return a list, and the lists in it, as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
