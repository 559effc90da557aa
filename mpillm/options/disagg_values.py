"""The disaggregation YAML as a source of options. For reading and writing: which key sets which option.

A YAML overrides the generation config, the workload and the defaults. It must not contradict a value that the
user set in a higher source.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any, NamedTuple

from disagg import DisaggConfig, ServerConfig
from disagg.schema import INNER, SECTIONS, SERVER, section_kind
from mpillm.files import path_exists
from mpillm.options.field import Field
from mpillm.options.fields import AllFields
from mpillm.options.fields.model import CHUNKING_POLICIES, SCHEDULER_POLICIES
from mpillm.options.fields.topology import PROMPTS_ALONE
from mpillm.options.sources import OptionValue, Source

_CTX, _GEN, _EXECUTORS = SECTIONS
_NOTHING = (None, "auto")  # values that set nothing


@dataclasses.dataclass(frozen=True, eq=False)
class YamlKey:
    """A key of a section that sets an option."""

    field: Field
    key: tuple[str, ...]  # from the outside in
    # The YAML's names by the option's values, if they differ.
    yaml_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: str = ""  # an LLM argument that sets the option if the key is missing
    unit: float = 1.0  # number in the YAML for 1 of the option; if not 1, the YAML's 0 sets nothing

    @property
    def name(self) -> str:
        return ".".join(self.key)

    def value_in(self, server: ServerConfig) -> Any:
        """Return the key's value, as the YAML names it; None without this key."""
        value = _at(server, self.key)
        return server.extra.get(self.also) if value is None and self.also else value


# The keys of each section for the number and the layout of its instances.
SIZES: dict[str, tuple[YamlKey, ...]] = {
    _CTX: (
        YamlKey(AllFields.num_ctx_servers, ("num_instances",)),
        YamlKey(AllFields.ctx_tp_size, ("tensor_parallel_size",)),
        YamlKey(AllFields.ctx_pp_size, ("pipeline_parallel_size",)),
    ),
    _GEN: (
        YamlKey(AllFields.num_gen_servers, ("num_instances",)),
        YamlKey(AllFields.gen_tp_size, ("tensor_parallel_size",)),
        YamlKey(AllFields.gen_pp_size, ("pipeline_parallel_size",)),
    ),
    _EXECUTORS: (
        YamlKey(AllFields.tensor_parallelism, ("tensor_parallel_size",)),
        YamlKey(AllFields.pipeline_parallelism, ("pipeline_parallel_size",)),
    ),
}
# Keys of every section.
EXPERTS = YamlKey(AllFields.moe_expert_parallelism, ("moe_expert_parallel_size",))
ROUTER = YamlKey(
    AllFields.traffic_distribution_policy,
    ("router", "type"),
    {name: name for name in AllFields.traffic_distribution_policy.choices}
    | {PROMPTS_ALONE: "load_balancing"},
)
# The parameters of routers that mpillm supports. Those of kv_cache_aware are TensorRT-LLM's.
ROUTER_ARGUMENTS = {
    "kv_cache_aware": ("tokens_per_block", "max_batch_size"),
    "conversation": ("max_batch_size",),
}
KV_TRANSFER_TIMEOUT = YamlKey(
    AllFields.kv_transfer_timeout_ms, ("cache_transceiver_config", "kv_transfer_timeout_ms")
)
# The leader has this key at the top level of the YAML, a server in its section.
PERF_METRICS = YamlKey(AllFields.perf_metrics_max_requests, ("perf_metrics_max_requests",))
SERVER_ONLY = KV_TRANSFER_TIMEOUT, PERF_METRICS
"""Keys that only instances that are separate servers have."""
KV_CACHE_DTYPE = YamlKey(AllFields.kv_cache_dtype, ("kv_cache_config", "dtype"), also="kv_cache_dtype")

# The engine's settings: fields of `EngineConfig`.
CORE = (
    YamlKey(AllFields.max_batch_size, ("max_batch_size",)),
    YamlKey(AllFields.max_num_tokens, ("max_num_tokens",)),
    YamlKey(AllFields.max_seq_len, ("max_seq_len",)),
    YamlKey(AllFields.kv_cache_tokens, ("kv_cache_config", "max_tokens")),
    YamlKey(
        AllFields.kv_cache_free_gpu_mem_fraction,
        ("kv_cache_config", "free_gpu_memory_fraction"),
        also="free_gpu_memory_fraction",
    ),
    YamlKey(AllFields.tokens_per_block, ("kv_cache_config", "tokens_per_block")),
    YamlKey(AllFields.enable_kv_cache_reuse, ("kv_cache_config", "enable_block_reuse")),
    YamlKey(AllFields.kv_host_cache_gb, ("kv_cache_config", "host_cache_size"), unit=1e9),
    YamlKey(AllFields.enable_chunked_context, ("enable_chunked_prefill",)),
    YamlKey(AllFields.speculative_config, ("speculative_config",)),
    YamlKey(
        AllFields.context_chunking_policy, ("scheduler_config", "context_chunking_policy"), CHUNKING_POLICIES
    ),
    YamlKey(
        AllFields.enable_max_num_tokens_tuning,
        ("scheduler_config", "dynamic_batch_config", "enable_max_num_tokens_tuning"),
    ),
    YamlKey(
        AllFields.batch_scheduler_policy,
        ("scheduler_config", "capacity_scheduler_policy"),
        SCHEDULER_POLICIES,
    ),
    YamlKey(AllFields.beam_width, ("max_beam_width",)),
    YamlKey(AllFields.dtype, ("dtype",)),
    KV_CACHE_DTYPE,
    YamlKey(AllFields.load_format, ("load_format",)),
)


class YamlValue(NamedTuple):
    """A value of the YAML: the option's value, and its text in the YAML."""

    value: OptionValue
    text: str


def of_the_run(yaml: DisaggConfig, path: str, serves_model: bool, is_one_run: bool) -> dict[str, YamlValue]:
    """Return the values that the YAML in `path` sets for the whole run, by option.

    `serves_model`: the YAML's `model` is for servers, not for the run. `is_one_run`: leader and instances are
    one run.
    """
    values = {AllFields.mode.name: _yaml_value(yaml.mode, path)}
    if yaml.model is not None and not serves_model:
        values[AllFields.model_path.name] = _yaml_value(yaml.model, f"{path}: model")
    for section, server in yaml.sections:
        if section == section_kind(section) and server.num_instances:
            values |= _section_values(SIZES[section], section, server, path)
    if is_one_run and (n_records := yaml.options.get(PERF_METRICS.name)) is not None:
        values[PERF_METRICS.field.name] = _yaml_value(n_records, f"{path}: {PERF_METRICS.name}")
    return values


def of_a_section(section: str, server: ServerConfig, path: str, is_one_run: bool) -> dict[str, YamlValue]:
    """Return the values that the YAML sets for a section's instances, by option. Others are left out.

    `is_one_run`: the instances are not separate servers.
    """
    unsupported = without_option(server)
    # Each section of a list has its own sizes.
    sizes = () if section == section_kind(section) else SIZES[section_kind(section)]
    keys = (*sizes, EXPERTS, *CORE, ROUTER, *(() if is_one_run else SERVER_ONLY))
    return _section_values(tuple(key for key in keys if key not in unsupported), section, server, path)


def without_option(server: ServerConfig) -> list[YamlKey]:
    """Return the keys of a section whose values TensorRT-LLM supports, but mpillm's options do not."""
    return [key for key in (*CORE, ROUTER) if not _has(key, key.value_in(server))]


def _has(key: YamlKey, value: Any) -> bool:
    field = key.field
    if value in _NOTHING or not field.choices or value in key.yaml_names.values():
        return True
    return isinstance(value, str) and value.lower() in map(str.lower, field.choices)


def _section_values(
    keys: tuple[YamlKey, ...], section: str, server: ServerConfig, path: str
) -> dict[str, YamlValue]:
    values = {}
    for key in keys:
        value = key.value_in(server)
        if value in _NOTHING:
            continue
        where = f"{path}: {section}.{key.name}"
        own = next((name for name, yaml_name in key.yaml_names.items() if yaml_name == value), value)
        if key.unit != 1 and isinstance(value, (int, float)):
            if not value:
                continue
            own = value / key.unit
        checked = OptionValue(key.field.check(own, where), Source.YAML, where)
        values[key.field.name] = YamlValue(checked, str(value))
    return values


def _yaml_value(value: Any, where: str) -> YamlValue:
    return YamlValue(OptionValue(value, Source.YAML, where), str(value))


def same(name: str, one: Any, other: Any) -> bool:
    """Return whether two values of an option are the same: a path may be written in several ways."""
    if name == AllFields.model_path.name and one and other:
        one, other = os.path.realpath(one), os.path.realpath(other)
    return bool(one == other)


def is_superseded(model: str | None, model_path: str | None) -> bool:
    """Return whether the folder `model_path` takes the place of the YAML's model, which is not here.

    A published YAML has the name of a model in a hub, or a folder of its own cluster.
    """
    if model is None or model_path is None:
        return False
    return "/" in model and not path_exists(model) and path_exists(model_path)


def router_arguments(server: ServerConfig, tokens_per_block: int) -> dict[str, int]:
    """Return the parameters of the section's router; `tokens_per_block` is a default."""
    names = ROUTER_ARGUMENTS["kv_cache_aware"]
    explicit = {name: server.router[name] for name in names if server.router.get(name) is not None}
    return {"tokens_per_block": tokens_per_block, **explicit}


def written(server: ServerConfig, values: Mapping[YamlKey, Any]) -> ServerConfig:
    """Return `server` with values at their keys, as the YAML names them. None and auto are left out."""
    known: dict[str, Any] = {}
    extra = dict(server.extra)
    for key, value in values.items():
        if value in _NOTHING:
            continue
        outer, *inner = key.key
        into = known if outer in SERVER else extra
        yaml_value = key.yaml_names.get(value, value) if key.yaml_names else value
        if key.unit != 1:
            yaml_value = int(value * key.unit)
        if inner:
            outer_value = known.get(outer, getattr(server, outer)) if outer in SERVER else extra.get(outer)
            yaml_value = _put(outer_value or {}, inner, yaml_value)
        into[outer] = yaml_value
    return dataclasses.replace(server, **known, extra=extra)


def _put(mapping: Mapping[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    """Return `mapping` with a value at the path `keys`, from the outside in."""
    key, *inner = keys
    return {**mapping, key: _put(mapping.get(key) or {}, inner, value) if inner else value}


# The leader's behavior without settings; TensorRT-LLM's defaults.
_USUAL: dict[str, Any] = {
    "hostname": DisaggConfig.hostname,
    "port": DisaggConfig.port,
    "max_retries": 1,
    "perf_metrics_max_requests": 0,
    "schedule_style": "context_first",
    "num_workers": 1,
}
LEADER_READS = ("hostname", "port", "max_retries")
"""The top-level keys that `serve --server_role leader` reads."""


def leaders_without_effect(yaml: DisaggConfig, read: Collection[str]) -> list[str]:
    """Return the names of the leader's settings that are not `read` and request unsupported behavior."""
    values = {"hostname": yaml.hostname, "port": yaml.port, "backend": yaml.backend, **yaml.options}
    return [
        name
        for name, value in values.items()
        if name not in read and value not in (False, None, _USUAL.get(name))
    ]


def without_effect(
    server: ServerConfig, beyond: Collection[YamlKey] = (), is_server: bool = False
) -> Iterator[str]:
    """Yield the names of a section's settings that no core of mpillm reads.

    `beyond`: keys whose values the core does not support; `is_server`: the instances are separate servers.
    """
    keys = [key for key in (EXPERTS, ROUTER, *CORE) if key not in beyond]
    keys += SERVER_ONLY if is_server else ()
    read = {key.key for key in keys} | {("moe_tensor_parallel_size",)}
    read |= {(key.also,) for key in keys if key.also and _at(server, key.key) is None}
    read |= {("router", name) for name in ROUTER_ARGUMENTS.get(ROUTER.value_in(server), ())}
    known = ("kv_cache_config", "cache_transceiver_config", "router", *(() if is_server else ("urls",)))
    values = {name: getattr(server, name) for name in known if getattr(server, name)}
    for outer, value in {**values, **server.extra}.items():
        yield from _unread((outer,), value, read)


def _at(server: ServerConfig, key: tuple[str, ...]) -> Any:
    """Return the value at `key`; None without this key."""
    outer, *inner = key
    value = getattr(server, outer) if outer in SERVER else server.extra.get(outer)
    for name in inner:
        value = (value or {}).get(name)
    return value


def _unread(key: tuple[str, ...], value: Any, read: Set[tuple[str, ...]]) -> Iterator[str]:
    """Yield the names of settings at and below `key` that are not in `read`."""
    if value in _NOTHING or key in read:
        return
    if isinstance(value, Mapping) and (key[-1] in INNER or any(known[: len(key)] == key for known in read)):
        for inner, inner_value in value.items():
            yield from _unread((*key, inner), inner_value, read)
    else:
        yield ".".join(key)
