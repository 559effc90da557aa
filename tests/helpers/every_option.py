"""A value for each option, and what each needs beside it."""

from __future__ import annotations

from disagg.errors import ConfigError
from mpillm.options.field import ANY, Field
from mpillm.options.fields import BY_NAME, FIELDS
from mpillm.options.fields.effects import LOADGEN
from mpillm.options.layers import layers_of
from mpillm.options.run_config import RunConfig
from mpillm.options.unused_options import unused_options
from mpillm.programs.load_clients.kinds import CONVERSATIONS

# A text of each option that is not its default, where none follows from its kind.
TEXTS = {
    "benchmarks": "llama2-70b",
    "scenarios": "Server",
    "accuracy_target": "0.999",
    "core_type": "",
    "core_options": "model:m",
    "precision": "fp8",
    "trtllm_server_urls": "a:1",
    "triton_server_urls": "a:1",
    "triton_grpc_ports": "a:1",
    "dataset": "synthetic",
    "goodput": "ttft:500",
    "server": "vllm",
    "harness": "aiperf",
    "server_role": "context",
    "synthetic_conversations": "turns=2",
    "trace_columns": "timestamp=T",
    "stop_words": "x",
    "extra_body": '{"priority":1}',
    "extra_headers": '{"X-Tenant":"a"}',
    "lora_modules": "a,b",
    "session_header": "X-Conversation",
    "endpoint_path": "/chat",
    "end_ids": "7",
    "user_conf": "x",
    "gpu_batch_size": "7",
    "speculative_config": "decoding_type:NGram",
    "trtllm_checkpoint_flags": "qformat:fp8",
    "trtllm_build_flags": "max_batch_size:7",
    "trtllm_runtime_flags": "max_batch_size:7",
    "batch_scheduler_policy": "no_evict",
    "kv_cache_free_gpu_mem_fraction": "0.5",
    "top_p": "0.5",
}


def text_of(field: Field) -> str:
    """Return a value of an option that is not its default."""
    if field.name in TEXTS:
        return TEXTS[field.name]
    if field.choices:
        return next(choice for choice in field.choices if choice != field.default)
    if isinstance(field.default, bool):
        return str(not field.default).lower()
    return "x" if field.from_string is None else "2" if field.default != 2 else "3"


def named(core: str) -> dict[str, str]:
    """Return the options for a core named with its backend."""
    name, _, backend = core.partition(" ")
    key = "triton_backend" if name == "triton_grpc" else "trtllm_backend"
    return {"core_type": name, **({"trtllm_runtime_flags": f"{key}:{backend}"} if backend else {})}


_NEEDED = ("server", "server_role", "server_target_qps", "request_cancellation_rate")


def beside(field: Field) -> dict[str, str]:
    """Return options that this one needs."""
    words = {
        use.needs[0]: BY_NAME[use.needs[0]].text(use.needs[1])
        for use in field.effect.uses
        if use.needs and use.needs[1] is not ANY and use.needs[0] in BY_NAME
    }
    loads = {load for use in field.effect.uses for load in use.loads}
    if loads and LOADGEN not in loads:
        words["harness"] = CONVERSATIONS if CONVERSATIONS in loads else TEXTS["harness"]
    for use in field.effect.uses:
        if use.needs and use.needs[1] is ANY and use.needs[0] in _NEEDED:
            needed = BY_NAME[use.needs[0]]
            words |= {**beside(needed), needed.name: text_of(needed)}
        if use.scenarios:
            words["scenarios"] = ",".join(use.scenarios)
    return words


COMMANDS = ("run", "serve", "plan", "generate-engines")  # the last stands for all stages


def config_of(**options: str) -> RunConfig:
    return RunConfig(layers_of(options, FIELDS))


def outcomes(core: str, field: Field) -> list[str]:
    """Return what comes of an option that is stated for a core, for each of COMMANDS."""
    try:
        config = config_of(**{**beside(field), **named(core), field.name: text_of(field)})
    except ConfigError:
        return ["error"] * len(COMMANDS)
    found = [
        [one for one in unused_options(config, command) if one.name == field.name] for command in COMMANDS
    ]
    return ["effect" if not each else "error" if each[0].is_error else "line" for each in found]
