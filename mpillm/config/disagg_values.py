"""The disaggregation YAML as a source of options: the option of each of its values, to read and to write.

A YAML overrides the generation config, the workload and the defaults. What the user set in a higher source
must be the same there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from disagg import DisaggConfig, ServerConfig
from disagg.schema import SECTIONS, SERVER
from mpillm import fields
from mpillm.configurator import Field
from mpillm.configurator.found import Found, Level, Origin
from mpillm.fields.model import CHUNKING_POLICIES, SCHEDULER_POLICIES
from mpillm.fields.topology import PROMPTS_ALONE

_CTX, _GEN, _EXECUTORS = SECTIONS
_NOTHING = (None, "auto")  # values that state nothing
# how TensorRT-LLM does what our cores do in their own way; in every file that we write
_THEIR_WAY = ("disable_overlap_scheduler",)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where a section states an option's value."""

    field: Field
    key: tuple[str, ...]  # from the outside in
    # the YAML's for the option's, where they differ
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_core: str = ""  # the name in `CoreConfig`, if that is another one
    also: str = ""  # an LLM argument that states it where the key does not

    @property
    def name(self) -> str:
        return ".".join(self.key)

    def of(self, server: ServerConfig) -> Any:
        """Return the value there, in the YAML's words; None if there is none."""
        outer, *inner = self.key
        value = getattr(server, outer) if outer in SERVER else server.extra.get(outer)
        for key in inner:
            value = (value or {}).get(key)
        return server.extra.get(self.also) if value is None and self.also else value


# The layout of each section.
SIZES: dict[str, tuple[Place, ...]] = {
    _CTX: (
        Place(fields.num_ctx_servers, ("num_instances",)),
        Place(fields.ctx_tp_size, ("tensor_parallel_size",)),
        Place(fields.ctx_pp_size, ("pipeline_parallel_size",)),
    ),
    _GEN: (
        Place(fields.num_gen_servers, ("num_instances",)),
        Place(fields.gen_tp_size, ("tensor_parallel_size",)),
        Place(fields.gen_pp_size, ("pipeline_parallel_size",)),
    ),
    _EXECUTORS: (
        Place(fields.tensor_parallelism, ("tensor_parallel_size",)),
        Place(fields.pipeline_parallelism, ("pipeline_parallel_size",)),
    ),
}
# What every section has.
EXPERTS = Place(fields.moe_expert_parallelism, ("moe_expert_parallel_size",))
ROUTER = Place(
    fields.traffic_distribution_policy,
    ("router", "type"),
    {name: name for name in fields.traffic_distribution_policy.choices} | {PROMPTS_ALONE: "load_balancing"},
)
# What TensorRT-LLM's router kv_cache_aware is given beside its name, of what ours knows.
ROUTER_ARGUMENTS = ("tokens_per_block", "max_batch_size")
KV_TRANSFER_TIMEOUT = Place(
    fields.kv_transfer_timeout_ms, ("cache_transceiver_config", "kv_transfer_timeout_ms")
)
KV_CACHE_DTYPE = Place(fields.kv_cache_dtype, ("kv_cache_config", "dtype"), also="kv_cache_dtype")

# How its instances run: what `CoreConfig` is made of.
CORE = (
    Place(fields.max_batch_size, ("max_batch_size",)),
    Place(fields.max_num_tokens, ("max_num_tokens",)),
    Place(fields.max_seq_len, ("max_seq_len",)),
    Place(fields.kv_cache_tokens, ("kv_cache_config", "max_tokens")),
    Place(
        fields.kv_cache_free_gpu_mem_fraction,
        ("kv_cache_config", "free_gpu_memory_fraction"),
        in_core="kv_cache_fraction",
        also="free_gpu_memory_fraction",
    ),
    Place(fields.tokens_per_block, ("kv_cache_config", "tokens_per_block")),
    Place(fields.enable_kv_cache_reuse, ("kv_cache_config", "enable_block_reuse")),
    Place(fields.enable_chunked_context, ("enable_chunked_prefill",)),
    Place(fields.speculative_config, ("speculative_config",)),
    Place(fields.context_chunking_policy, ("scheduler_config", "context_chunking_policy"), CHUNKING_POLICIES),
    Place(
        fields.enable_max_num_tokens_tuning,
        ("scheduler_config", "dynamic_batch_config", "enable_max_num_tokens_tuning"),
    ),
    Place(
        fields.batch_scheduler_policy, ("scheduler_config", "capacity_scheduler_policy"), SCHEDULER_POLICIES
    ),
    Place(fields.beam_width, ("max_beam_width",)),
    Place(fields.dtype, ("dtype",)),
    KV_CACHE_DTYPE,
    Place(fields.load_format, ("load_format",)),
)


class Stated(NamedTuple):
    """A value that the YAML states: as the option has it, and as the YAML writes it."""

    found: Found
    text: str


def of_the_run(yaml: DisaggConfig, path: str, serves_model: bool) -> dict[str, Stated]:
    """Return what the YAML in `path` states about the whole run, by option.

    `serves_model`: servers read `model`.
    """
    origin = Origin(Level.YAML, path)
    stated = {fields.mode.name: Stated(Found(yaml.mode, origin), yaml.mode)}
    if yaml.model is not None and not serves_model:
        stated[fields.model_path.name] = Stated(
            Found(yaml.model, Origin(Level.YAML, f"{path}: model")), yaml.model
        )
    for section, server in yaml.sections:
        stated |= _stated(SIZES[section], section, server, path)
    return stated


def of_a_section(section: str, server: ServerConfig, path: str) -> dict[str, Stated]:
    """Return what it states about a section's instances, by option; TensorRT-LLM's own routers: nothing."""
    theirs = [place for place in (ROUTER, KV_CACHE_DTYPE) if place.of(server) not in place.field.choices]
    return _stated(
        tuple(place for place in (EXPERTS, *CORE, ROUTER, KV_TRANSFER_TIMEOUT) if place not in theirs),
        section,
        server,
        path,
    )


def _stated(places: tuple[Place, ...], section: str, server: ServerConfig, path: str) -> dict[str, Stated]:
    stated = {}
    for place in places:
        value = place.of(server)
        if value in _NOTHING:
            continue
        where = f"{path}: {section}.{place.name}"
        ours = next((our for our, theirs in place.words.items() if theirs == value), value)
        stated[place.field.name] = Stated(
            Found(place.field.check(ours, where), Origin(Level.YAML, where)), str(value)
        )
    return stated


def same(name: str, one: Any, other: Any) -> bool:
    """Return whether two values of an option are the same: a path may be written in several ways."""
    return bool(
        one == other
        or (
            name == fields.model_path.name
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


def with_sections(yaml: DisaggConfig, change: Callable[[str, ServerConfig], ServerConfig]) -> DisaggConfig:
    """Return `yaml` with what `change` makes of each section, given its name and content."""
    changed: dict[str, Any] = {name: change(name, server) for name, server in yaml.sections}
    return dataclasses.replace(yaml, **changed)


def without_effect(server: ServerConfig) -> Iterator[str]:
    """Yield the names of a section's settings that none of our cores reads."""
    read = {place.key for place in (EXPERTS, ROUTER, *CORE)} | {(place.also,) for place in CORE}
    if ROUTER.of(server) == "kv_cache_aware":
        read |= {("router", name) for name in ROUTER_ARGUMENTS}
    for outer in ("kv_cache_config", "router", *server.extra):
        if outer not in _THEIR_WAY:
            yield from _unread(
                (outer,), getattr(server, outer) if outer in SERVER else server.extra[outer], read
            )


def _unread(key: tuple[str, ...], value: Any, read: Set[tuple[str, ...]]) -> Iterator[str]:
    """Yield the names of what is stated at `key` and in it, but not in `read`."""
    if value in _NOTHING or key in read:
        return
    if any(known[: len(key)] == key for known in read):
        for inner, there in value.items():
            yield from _unread((*key, inner), there, read)
    else:
        yield ".".join(key)
