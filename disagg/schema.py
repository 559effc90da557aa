"""The keys of the disaggregation YAML and their rules. Any other key is an LLM argument or unknown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .errors import ConfigError
from .yaml_text import is_text, value_text

# Sections, in the order in which their instances use ranks.
SECTIONS = ("context_servers", "generation_servers", "executors")
# From create_router in tensorrt_llm/serve/router.py, which compares names in lower case.
ROUTERS = (
    "round_robin",
    "load_balancing",
    "kv_cache_aware",
    "conversation",
    "centralized_kv_cache_aware",
    "remote_http",
)


def section_kind(section: str) -> str:
    """Return the name in `SECTIONS` of a section or of a list's item, such as ``executors[1]``."""
    return section.partition("[")[0]


# A rule: a text of the allowed values, for errors, and a test. `type(x) is int`, because True is an int.
Rule = tuple[str, Callable[[Any], bool]]
COUNT: Rule = ("an integer, at least 1", lambda x: type(x) is int and x >= 1)
_LIMIT: Rule = ("an integer, at least 1, or null", lambda x: x is None or (type(x) is int and x >= 1))
_NATURAL: Rule = ("an integer, at least 0", lambda x: type(x) is int and x >= 0)
_FRACTION: Rule = ("a number above 0 and at most 1", lambda x: type(x) in (int, float) and 0 < x <= 1)
BOOLEAN: Rule = ("true or false", lambda x: type(x) is bool)
_TEXT: Rule = (
    "a string that is not empty, without a null character",
    lambda x: isinstance(x, str) and x.strip() != "" and is_text(x),
)
MAPPING: Rule = ("a mapping", lambda x: isinstance(x, Mapping))
_HOST: Rule = (
    "a host name or an IPv4 address",
    lambda x: isinstance(x, str) and re.fullmatch(r"[\w.-]+", x, re.ASCII) is not None,
)
_PORT: Rule = ("an integer from 1 to 65535", lambda x: type(x) is int and 1 <= x <= 65535)
_URLS: Rule = ("a list of host:port, one for each instance", lambda x: isinstance(x, list))
URL: Rule = ("host:port, with a port from 1 to 65535", lambda x: isinstance(x, str) and _is_url(x))


def _is_url(text: str) -> bool:
    match = re.fullmatch(r"[\w.-]+:(\d{1,5})", text, re.ASCII)
    return match is not None and 1 <= int(match[1]) <= 65535


def _one_of(*values: str) -> Rule:
    return "one of " + ", ".join(values), lambda x: x in values


def _in_any_case(*values: str) -> Rule:
    return "one of " + ", ".join(values), lambda x: isinstance(x, str) and x.lower() in map(str.lower, values)


# Keys with one value for the whole run, at the top level or in sections.
RUN_WIDE: dict[str, Rule] = {"model": _TEXT, "backend": _TEXT}

# TensorRT-LLM's options for the leader: the named parameters of extract_disagg_cfg in
# tensorrt_llm/llmapi/disagg_utils.py.
TOP_LEVEL: dict[str, Rule] = {
    "hostname": _HOST,
    "port": _PORT,
    "max_retries": _NATURAL,
    "perf_metrics_max_requests": _NATURAL,
    "return_perf_metrics": BOOLEAN,
    "perf_metrics_output_dir": _TEXT,
    "conditional_disagg_config": MAPPING,
    "otlp_config": MAPPING,
    "disagg_cluster": MAPPING,
    "node_id": ("an integer from 0 to 255", lambda x: type(x) is int and 0 <= x <= 255),
    "schedule_style": _one_of("context_first", "generation_first"),
    "allow_request_chat_template": BOOLEAN,
    "gen_strip_message_history": BOOLEAN,
    "gen_tokids_ctxbytes": BOOLEAN,
    "num_workers": COUNT,
    "disagg_coordinator_url": _TEXT,
    "bind_host": _HOST,
    "server_keep_alive_timeout": COUNT,
    "internal_request_auth_key": _TEXT,
}

# With this key, servers register with TensorRT-LLM's leader and need no sections.
DISCOVERY = "disagg_cluster"

# The fields of ServerConfig except `extra`.
SERVER: dict[str, Rule] = {
    "num_instances": _NATURAL,
    "tensor_parallel_size": COUNT,
    "pipeline_parallel_size": COUNT,
    "context_parallel_size": COUNT,
    "moe_expert_parallel_size": COUNT,
    "max_batch_size": _LIMIT,
    "max_num_tokens": _LIMIT,
    "max_seq_len": _LIMIT,
    "kv_cache_config": MAPPING,
    "cache_transceiver_config": MAPPING,
    "router": MAPPING,
    "urls": _URLS,
}

# LLM arguments that mpillm also reads. They stay in `extra` with the other LLM arguments.
READ: dict[str, Rule] = {
    "scheduler_config": MAPPING,
    "enable_chunked_prefill": BOOLEAN,
    "max_beam_width": COUNT,
}

# Keys inside a section's mappings whose values are checked. For other keys, only the names are checked.
INNER: dict[str, dict[str, Rule]] = {
    "kv_cache_config": {
        "free_gpu_memory_fraction": _FRACTION,
        "max_tokens": COUNT,
        "tokens_per_block": COUNT,
        "enable_block_reuse": BOOLEAN,
        "enable_partial_reuse": BOOLEAN,
        "dtype": _TEXT,
    },
    "scheduler_config": {
        "capacity_scheduler_policy": _one_of("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"),
        "context_chunking_policy": _one_of("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"),
    },
    "cache_transceiver_config": {
        # Before release 1.0, these were in lower case.
        "backend": _in_any_case("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"),
        "transceiver_runtime": _in_any_case("CPP", "PYTHON", "auto"),
        "max_tokens_in_buffer": _NATURAL,  # 0: no limit
        "kv_transfer_timeout_ms": COUNT,
        "kv_transfer_sender_future_timeout_ms": COUNT,
    },
    "router": {
        "type": _in_any_case(*ROUTERS),
        "max_batch_size": COUNT,
        "tokens_per_block": COUNT,
    },
}

# Keys for which null means TensorRT-LLM's default.
NULLABLE = ("moe_expert_parallel_size", "kv_cache_config", "cache_transceiver_config", "router", "urls")

# LLM arguments that determine the expert-parallel size.
MOE_ARGUMENTS = ("moe_cluster_parallel_size", "moe_tensor_parallel_size")


def checked(where: str, value: Any, rule: Rule) -> Any:
    """Return `value`; raise ConfigError if it breaks the rule."""
    allowed, test = rule
    if not test(value):
        refuse(where, value, allowed)
    return value


def refuse(where: str, value: object, allowed: str) -> NoReturn:
    """Raise the error for a wrong value, with its place, the value, and the allowed values."""
    raise ConfigError(f"{where}: {value_text(value)}; must be {allowed}")
