"""Parameters of Triton's `tensorrt_llm` model for the embedded engine.

Each parameter has an effect, is listed as unused, or is an error because ignoring it would change answers or
measurements. The check runs when a repository is written, and again when a model is loaded, because users
edit the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from disagg.errors import ConfigError

# Parameters that the engine's model, its launcher or Triton's Python backend reads.
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
# Values that match the engine; any other value is an error.
_AS_IT_IS: Mapping[str, tuple[str, ...]] = {
    "decoding_mode": ("top_k", "top_p", "top_k_top_p", "beam_search"),  # each request chooses
    "encoder_model_path": (),
    "max_attention_window_size": (),
    "num_nodes": ("1",),
    "participant_ids": ("0",),
    "sink_token_length": ("0",),
}
# Values that match the engine; any other value is listed as unused.
_NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "gpu_weights_percent": ("1", "1.0"),
    "kv_cache_host_memory_bytes": ("0",),
    "kv_cache_onboard_blocks": ("false",),
}


def text_parameter(parameters: Mapping[str, Mapping[str, str]], name: str) -> str | None:
    """Return a parameter of a model's configuration; None if it is not set."""
    return set_text(parameters.get(name, {}).get("string_value", ""))


def set_text(value: str) -> str | None:
    """Return the text of a parameter; None if it is empty or an unfilled placeholder."""
    return None if not value or (value.startswith("${") and value.endswith("}")) else value


def unused_parameters(parameters: Mapping[str, str]) -> str:
    """Return a line that lists the parameters without effect on the embedded engine; "" if there are none.

    Raises ConfigError for an unsupported parameter that would change answers or measurements.
    """
    names = []
    for name, text in sorted(parameters.items()):
        if (value := set_text(text)) is None or name in _READ:
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
