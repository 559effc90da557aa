"""The disaggregation YAML as a source of options: the option of each of its values, to read and to write.

A YAML overrides the generation config, the workload and the defaults. What the user set in a higher source
must be the same there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from disagg import DisaggConfig, ServerConfig
from disagg.schema import INNER, SECTIONS, SERVER, section_kind
from mpillm.options.field import Field
from mpillm.options.fields import AllFields
from mpillm.options.fields.model import CHUNKING_POLICIES, SCHEDULER_POLICIES
from mpillm.options.fields.topology import PROMPTS_ALONE
from mpillm.options.sources import OptionValue, Source

_CTX, _GEN, _EXECUTORS = SECTIONS
_NOTHING = (None, "auto")  # values that state nothing


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where a section states an option's value."""

    field: Field
    key: tuple[str, ...]  # from the outside in
    # the YAML's for the option's, where they differ
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: str = ""  # an LLM argument that states it where the key does not

    @property
    def name(self) -> str:
        return ".".join(self.key)

    def value_in(self, server: ServerConfig) -> Any:
        """Return the value there, in the YAML's words; None if there is none."""
        value = _at(server, self.key)
        return server.extra.get(self.also) if value is None and self.also else value


# The layout of each section.
SIZES: dict[str, tuple[Place, ...]] = {
    _CTX: (
        Place(AllFields.num_ctx_servers, ("num_instances",)),
        Place(AllFields.ctx_tp_size, ("tensor_parallel_size",)),
        Place(AllFields.ctx_pp_size, ("pipeline_parallel_size",)),
    ),
    _GEN: (
        Place(AllFields.num_gen_servers, ("num_instances",)),
        Place(AllFields.gen_tp_size, ("tensor_parallel_size",)),
        Place(AllFields.gen_pp_size, ("pipeline_parallel_size",)),
    ),
    _EXECUTORS: (
        Place(AllFields.tensor_parallelism, ("tensor_parallel_size",)),
        Place(AllFields.pipeline_parallelism, ("pipeline_parallel_size",)),
    ),
}
# What every section has.
EXPERTS = Place(AllFields.moe_expert_parallelism, ("moe_expert_parallel_size",))
ROUTER = Place(
    AllFields.traffic_distribution_policy,
    ("router", "type"),
    {name: name for name in AllFields.traffic_distribution_policy.choices}
    | {PROMPTS_ALONE: "load_balancing"},
)
# What TensorRT-LLM's router kv_cache_aware is given beside its name, of what ours knows.
ROUTER_ARGUMENTS = ("tokens_per_block", "max_batch_size")
KV_TRANSFER_TIMEOUT = Place(
    AllFields.kv_transfer_timeout_ms, ("cache_transceiver_config", "kv_transfer_timeout_ms")
)
# At the top level the leader's, in a section a server's.
PERF_METRICS = Place(AllFields.perf_metrics_max_requests, ("perf_metrics_max_requests",))
SERVER_ONLY = KV_TRANSFER_TIMEOUT, PERF_METRICS
"""What a section states about instances that are servers of their own."""
KV_CACHE_DTYPE = Place(AllFields.kv_cache_dtype, ("kv_cache_config", "dtype"), also="kv_cache_dtype")

# How its instances run: fields of `EngineConfig`.
CORE = (
    Place(AllFields.max_batch_size, ("max_batch_size",)),
    Place(AllFields.max_num_tokens, ("max_num_tokens",)),
    Place(AllFields.max_seq_len, ("max_seq_len",)),
    Place(AllFields.kv_cache_tokens, ("kv_cache_config", "max_tokens")),
    Place(
        AllFields.kv_cache_free_gpu_mem_fraction,
        ("kv_cache_config", "free_gpu_memory_fraction"),
        also="free_gpu_memory_fraction",
    ),
    Place(AllFields.tokens_per_block, ("kv_cache_config", "tokens_per_block")),
    Place(AllFields.enable_kv_cache_reuse, ("kv_cache_config", "enable_block_reuse")),
    Place(AllFields.enable_chunked_context, ("enable_chunked_prefill",)),
    Place(AllFields.speculative_config, ("speculative_config",)),
    Place(
        AllFields.context_chunking_policy, ("scheduler_config", "context_chunking_policy"), CHUNKING_POLICIES
    ),
    Place(
        AllFields.enable_max_num_tokens_tuning,
        ("scheduler_config", "dynamic_batch_config", "enable_max_num_tokens_tuning"),
    ),
    Place(
        AllFields.batch_scheduler_policy,
        ("scheduler_config", "capacity_scheduler_policy"),
        SCHEDULER_POLICIES,
    ),
    Place(AllFields.beam_width, ("max_beam_width",)),
    Place(AllFields.dtype, ("dtype",)),
    KV_CACHE_DTYPE,
    Place(AllFields.load_format, ("load_format",)),
)


class YamlValue(NamedTuple):
    """A value that the YAML states: as the option has it, and as the YAML writes it."""

    value: OptionValue
    text: str


def of_the_run(yaml: DisaggConfig, path: str, serves_model: bool, is_whole: bool) -> dict[str, YamlValue]:
    """Return what the YAML in `path` states about the whole run, by option.

    `serves_model`: servers read `model`. `is_whole`: leader and instances are one run.
    """
    stated = {AllFields.mode.name: _yaml_value(yaml.mode, path)}
    if yaml.model is not None and not serves_model:
        stated[AllFields.model_path.name] = _yaml_value(yaml.model, f"{path}: model")
    for section, server in yaml.sections:
        if section == section_kind(section) and server.num_instances:
            stated |= _stated(SIZES[section], section, server, path)
    if is_whole and (kept := yaml.options.get(PERF_METRICS.name)) is not None:
        stated[PERF_METRICS.field.name] = _yaml_value(kept, f"{path}: {PERF_METRICS.name}")
    return stated


def of_a_section(section: str, server: ServerConfig, path: str, is_whole: bool) -> dict[str, YamlValue]:
    """Return what it states about a section's instances, by option, without values that no option has.

    `is_whole`: its instances are no servers of their own.
    """
    theirs = without_option(server)
    sizes = (
        () if section == section_kind(section) else SIZES[section_kind(section)]
    )  # of a list: each has its own
    places = (*sizes, EXPERTS, *CORE, ROUTER, *(() if is_whole else SERVER_ONLY))
    return _stated(tuple(place for place in places if place not in theirs), section, server, path)


def without_option(server: ServerConfig) -> list[Place]:
    """Return where a section states a value that TensorRT-LLM has and an option of ours lacks."""
    return [place for place in (*CORE, ROUTER) if not _has(place, place.value_in(server))]


def _has(place: Place, value: Any) -> bool:
    field = place.field
    if value in _NOTHING or not field.choices or value in place.words.values():
        return True
    return isinstance(value, str) and value.lower() in map(str.lower, field.choices)


def _stated(places: tuple[Place, ...], section: str, server: ServerConfig, path: str) -> dict[str, YamlValue]:
    stated = {}
    for place in places:
        value = place.value_in(server)
        if value in _NOTHING:
            continue
        where = f"{path}: {section}.{place.name}"
        ours = next((our for our, theirs in place.words.items() if theirs == value), value)
        checked = OptionValue(place.field.check(ours, where), Source.YAML, where)
        stated[place.field.name] = YamlValue(checked, str(value))
    return stated


def _yaml_value(value: Any, where: str) -> YamlValue:
    return YamlValue(OptionValue(value, Source.YAML, where), str(value))


def same(name: str, one: Any, other: Any) -> bool:
    """Return whether two values of an option are the same: a path may be written in several ways."""
    return bool(
        one == other
        or (
            name == AllFields.model_path.name
            and one
            and other
            and os.path.realpath(one) == os.path.realpath(other)
        )
    )


def router_arguments(server: ServerConfig, tokens_per_block: int) -> dict[str, int]:
    """Return those of the router kv_cache_aware, by name; `tokens_per_block`: if the section says nothing."""
    stated = {name: server.router[name] for name in ROUTER_ARGUMENTS if server.router.get(name) is not None}
    return {"tokens_per_block": tokens_per_block, **stated}


def written(server: ServerConfig, values: Mapping[Place, Any]) -> ServerConfig:
    """Return `server` with values in their places, in the YAML's words, without None and auto."""
    known: dict[str, Any] = {}
    extra = dict(server.extra)
    for place, value in values.items():
        if value in _NOTHING:
            continue
        outer, *inner = place.key
        into = known if outer in SERVER else extra
        stated = place.words.get(value, value) if place.words else value
        if inner:
            there = known.get(outer, getattr(server, outer)) if outer in SERVER else extra.get(outer)
            stated = _put(there or {}, inner, stated)
        into[outer] = stated
    return dataclasses.replace(server, **known, extra=extra)


def _put(there: Mapping[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    """Return `there` with a value where `keys` lead, from the outside in."""
    key, *inner = keys
    return {**there, key: _put(there.get(key) or {}, inner, value) if inner else value}


# What the leader does if nothing is stated; what TensorRT-LLM's does by default.
_USUAL: dict[str, Any] = {
    "hostname": DisaggConfig.hostname,
    "port": DisaggConfig.port,
    "max_retries": 1,
    "perf_metrics_max_requests": 0,
    "schedule_style": "context_first",
    "num_workers": 1,
}
LEADER_READS = ("hostname", "port", "max_retries")
"""What `serve --server_role leader` reads of the top level."""


def leaders_without_effect(yaml: DisaggConfig, read: Collection[str]) -> list[str]:
    """Return the names of settings for the leader that are not `read` and ask for what it does not do."""
    stated = {"hostname": yaml.hostname, "port": yaml.port, "backend": yaml.backend, **yaml.options}
    return [
        name
        for name, value in stated.items()
        if name not in read and value not in (False, None, _USUAL.get(name))
    ]


def without_effect(
    server: ServerConfig, beyond: Collection[Place] = (), is_server: bool = False
) -> Iterator[str]:
    """Yield the names of a section's settings that none of our cores reads.

    `beyond`: places whose values the core lacks; `is_server`: its instances are servers of their own.
    """
    places = [place for place in (EXPERTS, ROUTER, *CORE) if place not in beyond]
    places += SERVER_ONLY if is_server else ()
    read = {place.key for place in places} | _other_names(server, places) | {("moe_tensor_parallel_size",)}
    if ROUTER.value_in(server) == "kv_cache_aware":
        read |= {("router", name) for name in ROUTER_ARGUMENTS}
    known = ("kv_cache_config", "cache_transceiver_config", "router", *(() if is_server else ("urls",)))
    stated = {name: getattr(server, name) for name in known if getattr(server, name)}
    for outer, value in {**stated, **server.extra}.items():
        yield from _unread((outer,), value, read)


def _other_names(server: ServerConfig, places: Iterable[Place]) -> set[tuple[str, ...]]:
    """Return the keys that state an option where its usual key does not."""
    return {(place.also,) for place in places if place.also and _at(server, place.key) is None}


def _at(server: ServerConfig, key: tuple[str, ...]) -> Any:
    """Return what is stated at `key`; None if nothing is."""
    outer, *inner = key
    value = getattr(server, outer) if outer in SERVER else server.extra.get(outer)
    for name in inner:
        value = (value or {}).get(name)
    return value


def _unread(key: tuple[str, ...], value: Any, read: Set[tuple[str, ...]]) -> Iterator[str]:
    """Yield the names of what is stated at `key` and in it, but not in `read`."""
    if value in _NOTHING or key in read:
        return
    if isinstance(value, Mapping) and (key[-1] in INNER or any(known[: len(key)] == key for known in read)):
        for inner, there in value.items():
            yield from _unread((*key, inner), there, read)
    else:
        yield ".".join(key)
