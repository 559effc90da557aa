"""The disaggregation YAML as typed data.

TensorRT-LLM defines the format (`trtllm-serve disaggregated -c`). mpillm adds the section `executors`.

Sections. A disaggregated file has `context_servers` and `generation_servers`. An aggregated file has only
`executors`. With `disagg_cluster`, servers register with TensorRT-LLM's leader, and sections may be missing.
All three sections accept the keys of `ServerConfig`. In mpillm's own runs, a section may also be a list of
such mappings, for instances that differ (`executors[0]`, `executors[1]`). Any other key in a section is an
LLM argument and is kept in `extra`. An unknown LLM argument that resembles a known key (`num_instance`) is
refused as misspelled. The same applies to keys inside mappings from which mpillm reads some keys, such as
`kv_cache_config`.

Top level. `hostname`, `port`, `model`, `backend`, and TensorRT-LLM's options for the leader (`options`). As
in TensorRT-LLM, any other key at the top level applies to every section. The same key with two values is an
error. mpillm is stricter with names: it refuses a key that resembles a known key, and a mapping that
looks like a section but has another name.

All instances of a run serve one model: sections may repeat `model` and `backend`, but all values must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import ConfigError, nearest
from .llm_args import INNER_ARGUMENTS, LLM_ARGUMENTS
from .schema import (
    COUNT,
    DISCOVERY,
    INNER,
    MAPPING,
    MOE_ARGUMENTS,
    NULLABLE,
    READ,
    RUN_WIDE,
    SECTIONS,
    SERVER,
    TOP_LEVEL,
    URL,
    checked,
    refuse,
    section_kind,
)
from .text_file import read_text
from .yaml_text import plain, read, write

EXAMPLE = """\
context_servers: {num_instances: 1, tensor_parallel_size: 2}
generation_servers: {num_instances: 2, tensor_parallel_size: 4}"""
"""The two sections of a disaggregated file."""

# Similarity from which a key counts as misspelled: to a key that mpillm reads, and to an LLM argument. The
# second limit is stricter, because each release adds arguments with names that resemble older ones.
_CLOSE, _SLIP = 0.85, 0.93


@dataclass(frozen=True)
class ServerConfig:
    """The equal instances of one section, or of one item of a list. Parallel sizes are in ranks."""

    num_instances: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    moe_expert_parallel_size: int = 1  # divides tensor_parallel_size: expert parallelism splits a TP group
    max_batch_size: int | None = None  # requests. None, here and in the next two: the backend's default
    max_num_tokens: int | None = None  # tokens in one step
    max_seq_len: int | None = None  # tokens of prompt plus answer
    kv_cache_config: Mapping[str, Any] = field(default_factory=dict)
    cache_transceiver_config: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)  # "type" is one of schema.ROUTERS
    urls: tuple[str, ...] = ()  # host:port of each instance, or empty
    extra: Mapping[str, Any] = field(default_factory=dict)  # LLM arguments, unchanged

    @property
    def ranks_per_instance(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def n_workers(self) -> int:
        """Ranks of all instances together."""
        return self.num_instances * self.ranks_per_instance


@dataclass(frozen=True)
class DisaggConfig:
    """Content of a file. `parse`, `load`, `from_mapping`, `generate` check it; the constructor does not."""

    hostname: str = "localhost"  # address of TensorRT-LLM's leader
    port: int = 8000
    model: str | None = None
    backend: str | None = None
    context_servers: ServerConfig | None = None
    generation_servers: ServerConfig | None = None
    executors: ServerConfig | None = None
    # Sections that are lists in the file, by name. They replace the three fields above.
    lists: Mapping[str, tuple[ServerConfig, ...]] = field(default_factory=dict)
    # TensorRT-LLM's options for the leader, unchanged.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """ "disaggregated" or "aggregated"."""
        aggregated = self.executors is not None or SECTIONS[2] in self.lists
        return "aggregated" if aggregated else "disaggregated"

    @property
    def is_single_phase(self) -> bool:
        """Whether there is one context or one generation instance only; another run has the other phase."""
        return (
            self.mode == "disaggregated"
            and DISCOVERY not in self.options
            and len(self.sections) == 1
            and self.sections[0][1].num_instances == 1
        )

    @property
    def sections(self) -> tuple[tuple[str, ServerConfig], ...]:
        """Name and content of the existing sections, in the order in which their instances use ranks.

        The name of a list's item contains its index: `executors[1]`.
        """
        sections: list[tuple[str, ServerConfig]] = []
        for name in SECTIONS:
            if (section := getattr(self, name)) is not None:
                sections.append((name, section))
            sections += [(f"{name}[{i}]", server) for i, server in enumerate(self.lists.get(name, ()))]
        return tuple(sections)

    def with_sections(self, change: Callable[[str, ServerConfig], ServerConfig]) -> DisaggConfig:
        """Return a copy in which `change(name, content)` replaces each section."""
        return replace(self, **_as_fields({name: change(name, server) for name, server in self.sections}))

    @property
    def n_workers(self) -> int:
        """Ranks of all instances of all sections."""
        return sum(server.n_workers for _, server in self.sections)


def load(path: str) -> DisaggConfig:
    """Read the configuration in the file `path`. Raises ConfigError."""
    return parse(read_text(path), str(path))


def parse(text: str, source: str = "<string>") -> DisaggConfig:
    """Parse YAML `text`. Raises ConfigError, which begins with `source`."""
    return from_mapping(read(text, source), source)


def dump(config: DisaggConfig) -> str:
    """Write YAML text that `parse` reads back as an equal configuration. Every section is complete."""
    data: dict[str, Any] = {"hostname": config.hostname, "port": config.port}
    data.update((key, getattr(config, key)) for key in RUN_WIDE if getattr(config, key) is not None)
    data.update(config.options)
    defaults = vars(ServerConfig())
    sections: dict[str, Any] = {}
    for name, server in config.sections:
        # These sizes are written even if 1, because programs that read the file expect them.
        sizes = ("num_instances", "tensor_parallel_size", "pipeline_parallel_size")
        section = {
            key: getattr(server, key)
            for key in SERVER
            if key in sizes or getattr(server, key) != defaults[key]
        }
        if server.urls:
            section["urls"] = list(server.urls)
        section |= dict(server.extra)
        kind = section_kind(name)
        sections[kind] = section if kind == name else [*sections.get(kind, ()), section]
    return write(data | sections)


def _as_fields(sections: Mapping[str, ServerConfig]) -> dict[str, Any]:
    """Return the fields of a `DisaggConfig` with these sections, by field name."""
    plain = {name: server for name, server in sections.items() if name == section_kind(name)}
    lists: dict[str, tuple[ServerConfig, ...]] = {}
    for name, server in sections.items():
        if name not in plain:
            lists[section_kind(name)] = (*lists.get(section_kind(name), ()), server)
    return {**plain, "lists": lists}


def _flat(source: str, data: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the content of each section in `data`, by its name."""
    contents: dict[str, Any] = {}
    for kind in SECTIONS:
        if kind not in data:
            continue
        value = data[kind]
        if isinstance(value, list):
            contents |= {f"{kind}[{i}]": one for i, one in enumerate(value)} or {kind: value}
        else:
            contents[kind] = {} if value is None and kind != SECTIONS[2] else value
    return {name: checked(f"{source}: {name}", value, MAPPING) for name, value in contents.items()}


def from_mapping(data: Mapping[Any, Any], source: str) -> DisaggConfig:
    """Check `data`, the content of a YAML file. Raises ConfigError, which begins with `source`."""
    data = plain(data, source)
    shared_keys: dict[str, Any] = {}
    for key, value in data.items():
        if key in TOP_LEVEL or key in RUN_WIDE or key in SECTIONS:
            continue
        _refuse_misspelt(source, key, value)
        shared_keys[key] = value
    options = {
        key: checked(f"{source}: {key}", data[key], rule)
        for key, rule in TOP_LEVEL.items()
        if data.get(key) is not None
    }
    for key, value in options.items():
        _check_inner(f"{source}: {key}", key, value)
    hostname, port = options.pop("hostname", DisaggConfig.hostname), options.pop("port", DisaggConfig.port)

    sections = _flat(source, data)
    kinds = tuple(dict.fromkeys(map(section_kind, sections)))
    are_named = kinds in (SECTIONS[:2], SECTIONS[2:])
    if not are_named and (DISCOVERY not in options or SECTIONS[2] in kinds):
        missing = " and ".join(name for name in SECTIONS[:2] if name not in kinds)
        if SECTIONS[2] not in kinds:
            raise ConfigError(
                f"{source}: lacks {missing}; must have both context_servers and generation_servers"
                f" (disaggregated), or only executors (aggregated), such as\n{EXAMPLE}"
            )
        raise ConfigError(
            f"{source}: the sections are {' and '.join(kinds)}; must be both context_servers and"
            " generation_servers (disaggregated), or only executors (aggregated)"
        )
    run_wide = {key: _run_wide(source, key, data, sections) for key in RUN_WIDE}
    servers = {name: _server(source, name, section, shared_keys) for name, section in sections.items()}
    _check_addresses(source, f"{hostname}:{port}", servers)
    fields: dict[str, Any] = {**run_wide, **_as_fields(servers)}
    return DisaggConfig(hostname, port, **fields, options=options)


def _refuse_misspelt(source: str, key: str, value: object) -> None:
    """Raise ConfigError if a top-level key resembles a known key, or if its value looks like a section."""
    if key in SERVER or key in LLM_ARGUMENTS:
        return
    section = nearest(key, SECTIONS, _CLOSE)
    if section or (isinstance(value, Mapping) and not {*SERVER}.isdisjoint(value)):
        raise ConfigError(
            f"{source}: unknown section {key!r}{section}; the sections are {', '.join(SECTIONS)}"
        )
    known = nearest(key, (*TOP_LEVEL, *RUN_WIDE, *SERVER, *READ), _CLOSE) or nearest(
        key, LLM_ARGUMENTS, _SLIP
    )
    if known:
        raise ConfigError(
            f"{source}: unknown key {key!r}{known}; if it is a new LLM argument, put it inside the sections"
        )


def _run_wide(
    source: str, key: str, data: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """Return the value of `model` or `backend` from the top level or the sections, which must agree."""
    places = {key: data, **{f"{name}.{key}": section for name, section in sections.items()}}
    by_place = {place: values[key] for place, values in places.items() if values.get(key) is not None}
    for place, value in by_place.items():
        checked(f"{source}: {place}", value, RUN_WIDE[key])
        first_place, first = next(iter(by_place.items()))
        if value != first:
            refuse(f"{source}: {place}", value, f"the same as {first_place}, {first!r}")
    return next(iter(by_place.values()), None)


def _server(
    source: str, name: str, section: Mapping[str, Any], shared_keys: Mapping[str, Any]
) -> ServerConfig:
    values = {key: value for key, value in section.items() if key not in RUN_WIDE}
    for key, value in shared_keys.items():
        if values.setdefault(key, value) != value:
            refuse(f"{source}: {name}.{key}", values[key], f"the same as at the top level, {value!r}")

    known: dict[str, Any] = {}
    for key, rule in {**SERVER, **READ}.items():
        if key not in values:
            continue
        value = values[key]
        where = f"{source}: {name}.{key}" if key in section else f"{source}: {key}"
        if key in SERVER:
            del values[key]
        if value is None and (key in NULLABLE or key in READ):
            continue
        checked(where, value, COUNT if (key, section_kind(name)) == ("num_instances", "executors") else rule)
        _check_inner(where, key, value)
        if key in SERVER:
            known[key] = value
        for inner, inner_rule in INNER.get(key, {}).items():
            if value.get(inner) is not None:
                checked(f"{where}.{inner}", value[inner], inner_rule)
    for key in values:
        if key not in LLM_ARGUMENTS and (known_key := nearest(key, (*SERVER, *READ), _CLOSE)):
            raise ConfigError(f"{source}: {name}: unknown key {key!r}{known_key}")

    if router := known.get("router", {}).get("type"):
        known["router"] = {**known["router"], "type": router.lower()}
    known["urls"] = tuple(known.get("urls", ()))
    for index, url in enumerate(known["urls"]):
        checked(f"{source}: {name}.urls[{index}]", url, URL)
    _check_experts(f"{source}: {name}", known, values)
    server = ServerConfig(**known, extra=values)
    if server.urls and len(server.urls) != server.num_instances:
        raise ConfigError(
            f"{source}: {name}.urls: {len(server.urls)} given; must be {server.num_instances} (num_instances)"
        )
    return server


def _check_inner(where: str, key: str, value: object) -> None:
    """Raise ConfigError if an unknown key in `value`, the mapping under `key`, resembles a known key."""
    known = INNER_ARGUMENTS.get(key, frozenset())
    for inner in value if isinstance(value, Mapping) else ():
        if inner not in known and (suggestion := nearest(inner, known, _CLOSE)):
            raise ConfigError(f"{where}: unknown key {inner!r}{suggestion}")


def _check_experts(where: str, known: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Check TensorRT-LLM's rule for MoE sizes, and set the expert-parallel size that follows from it.

    The rule: moe_tensor x moe_expert (x moe_cluster) parallel size = tensor parallel size.
    """
    tensor = known.get("tensor_parallel_size", 1)
    divisors = {
        key: checked(f"{where}.{key}", extra[key], COUNT)
        for key in MOE_ARGUMENTS
        if extra.get(key) is not None
    }
    if "moe_expert_parallel_size" in known:
        divisors["moe_expert_parallel_size"] = known["moe_expert_parallel_size"]
    quotient = tensor
    for key, size in divisors.items():
        if quotient % size:
            allowed = f"a divisor of tensor_parallel_size, {tensor}: expert parallelism splits a TP group"
            refuse(f"{where}.{key}", size, allowed)
        quotient //= size
    if "moe_tensor_parallel_size" not in divisors:
        return
    if "moe_expert_parallel_size" not in divisors:
        known["moe_expert_parallel_size"] = quotient
    elif quotient != 1:
        product = " x ".join(divisors)
        raise ConfigError(
            f"{where}: {product} = {tensor // quotient}; must be tensor_parallel_size, {tensor}"
        )


def _check_addresses(source: str, leader: str, servers: Mapping[str, ServerConfig]) -> None:
    """Refuse an address that is used twice.

    TensorRT-LLM treats a URL in both sections as one mixed server. In mpillm, an instance has one role.
    """
    used = {leader: "hostname and port"}
    for name, server in servers.items():
        for index, url in enumerate(server.urls):
            where = f"{name}.urls[{index}]"
            if url in used:
                refuse(f"{source}: {where}", url, f"unique; {used[url]} has the same address")
            used[url] = where
