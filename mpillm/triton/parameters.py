"""The parameters of Triton's `tensorrt_llm` model, as the embedded engine takes them.

Each has its effect, or is refused because answers or what is measured would be others, or is named as one
without effect: where a repository is written, and, as people change its files, where a model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from disagg.errors import ConfigError

# What the engine's model, its launcher or Triton's Python backend reads.
_READ = frozenset(
    {
        "batch_scheduler_policy",
        "cancellation_check_period_ms",
        "core_config",
        "enable_chunked_context",
        "enable_kv_cache_reuse",
        "exclude_input_in_output",
        "executor_worker_path",
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "gpt_model_type",
        "gpu_device_ids",
        "kv_cache_free_gpu_mem_fraction",
        "lora_cache_host_memory_bytes",
        "max_beam_width",
        "max_tokens_in_paged_kv_cache",
    }
)
# The values that ask for what the engine does; any other is refused.
_AS_IT_IS: Mapping[str, tuple[str, ...]] = {
    "decoding_mode": ("top_k", "top_p", "top_k_top_p", "beam_search"),  # each request chooses
    "encoder_model_path": (),
    "max_attention_window_size": (),
    "num_nodes": ("1",),
    "participant_ids": ("0",),
    "sink_token_length": ("0",),
}
# The values that ask for what the engine does; any other is named.
_NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "gpu_weights_percent": ("1", "1.0"),
    "kv_cache_host_memory_bytes": ("0",),
    "kv_cache_onboard_blocks": ("false",),
}


def text_parameter(parameters: Mapping[str, Mapping[str, str]], name: str) -> str | None:
    """Return a parameter of a model's configuration; None for an empty or unfilled placeholder's."""
    return stated(parameters.get(name, {}).get("string_value", ""))


def stated(value: str) -> str | None:
    """Return the text of a parameter; None if it is empty or a placeholder that nobody has filled."""
    return None if not value or (value.startswith("${") and value.endswith("}")) else value


def in_vain(parameters: Mapping[str, str]) -> str:
    """Name the parameters without effect on the embedded engine, in one line; "" if there are none.

    Raises ConfigError for one that would change what is answered or measured, if the engine had it.
    """
    names = []
    for name, text in sorted(parameters.items()):
        if (value := stated(text)) is None or name in _READ:
            continue
        if name in ("gpt_model_path", "tokenizer_dir"):
            if json.dumps(value) not in parameters.get("core_config", ""):
                raise ConfigError(
                    f"parameter {name}: {value!r}: core_config names another model; write the repository"
                    " again, with --model_path or --engine_dir"
                )
            continue
        if name in _AS_IT_IS:
            if value not in _AS_IT_IS[name]:
                has = _AS_IT_IS[name]
                cure = f"it has {', '.join(has)}" if has else "leave it out"
                raise ConfigError(
                    f"parameter {name}: {value!r}: the embedded engine has no such thing; {cure}",
                    about=["trtllm_runtime_flags"],
                )
        elif value.lower() not in _NEUTRAL.get(name, ()):
            names.append(f"{name}: {value}")
    return f"without effect on the embedded engine: {', '.join(names)}" if names else ""
