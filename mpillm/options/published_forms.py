"""Recipes of other projects, converted to TensorRT-LLM's `disagg_config`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from disagg.schema import DISCOVERY, SECTIONS
from disagg.text_file import read_text
from disagg.yaml_text import plain, read, value_text
from mpillm.files import path_exists
from mpillm.options.published_servers import (
    Node,
    check_gpus,
    is_mapping,
    model_of,
    parsed_flags,
    section_of_flags,
)

_CTX, _GEN, _EXECUTORS = SECTIONS
_ROLES = {"prefill": _CTX, "decode": _GEN, "agg": _EXECUTORS}
_ENGINES = _TRTLLM, _VLLM, _SGLANG = ("trtllm", "vllm", "sglang")  # the last is srt-slurm's default
_SRT_ROUTERS = ("prefill", "ctx_router"), ("decode", "gen_router")
DYNAMO_ROUTERS = {"kv": "kv_cache_aware", "round-robin": "round_robin"}
_LLM_D_ROLES = ("prefill", "decode")
_MAX_NAMES = 5  # in a message


class PublishedForm(NamedTuple):
    """A published form."""

    name: str
    is_form: Callable[[Mapping[str, Any]], bool]
    # To the content of a `disagg_config`. Raises ConfigError for a file that cannot be used.
    convert: Callable[[Node], dict[str, Any]]


def _trtllm_benchmark(node: Node) -> dict[str, Any]:
    hardware, workers = node.child("hardware"), node.child("worker_config")
    content: dict[str, Any] = model_of(node.child("environment"), "model_path")
    for name, section in (("ctx", _CTX), ("gen", _GEN)):
        if workers.get(name) is None:
            raise ConfigError(f"{workers.where(name)}: missing; must be the settings of a server")
        n_servers = hardware.count(f"num_{name}_servers", default=1)
        content[section] = {"num_instances": n_servers, **workers.child(name).take()}
    return content


def _is_srt(data: Mapping[str, Any]) -> bool:
    roles, resources = data.get("roles"), data.get("resources")
    if isinstance(roles, Mapping) and not roles.keys().isdisjoint(_ROLES):
        return True
    workers = {f"{role}_workers" for role in _ROLES}
    return is_mapping(data, "resources", "backend") and not workers.isdisjoint(resources or ())


def _has_srt_variants(data: Mapping[str, Any]) -> bool:
    has_overrides = is_mapping(data, "base") and any("override_" in name for name in data)
    return has_overrides or (_is_srt(data) and "sweep" in data)


def _srt_variants(node: Node) -> dict[str, Any]:
    names = [name for name in node.data if name == "sweep" or "override_" in name][:_MAX_NAMES]
    raise ConfigError(
        f"it has several variants ({', '.join(names)}); write one of them, with the values of base,"
        " as a file of its own"
    )


def _srt(node: Node) -> dict[str, Any]:
    for key in ("schema", "name"):
        node.get(key)
    content: dict[str, Any] = model_of(node.child("model"), "path")
    servers: dict[str, tuple[Node, str, str, Node]] = {}  # names of two keys, and the engine's arguments
    if is_mapping(node.data, "roles"):  # schema 2
        kind = node.child("engine").get("type") if is_mapping(node.data, "engine") else node.get("engine")
        roles = node.child("roles")
        for role in filter(roles.data.__contains__, _ROLES):
            part = roles.child(role)
            servers[role] = part, "workers", "gpus", part.child("args")
    else:
        backend, resources = node.child("backend"), node.child("resources")
        kind = backend.get("type")
        args = backend.child(f"{kind or _SGLANG}_config")
        for role, name in zip(_ROLES, ("prefill", "decode", "aggregated"), strict=True):
            if resources.data.get(f"{role}_workers") is not None:
                servers[role] = resources, f"{role}_workers", f"gpus_per_{role}", args.child(name)
    if (kind or _SGLANG) not in _ENGINES:
        raise ConfigError(f"{node.source}: engine {value_text(kind)}; must be {', '.join(_ENGINES)}")
    routers = _srt_routers(node.child("frontend"))
    for role, (part, n_workers, n_gpus, args) in servers.items():
        n_copies = 1
        if kind == _TRTLLM:
            section = dict(args.take())
        else:
            section, n_copies = section_of_flags(args, kind != _VLLM)
        check_gpus(part, n_gpus, section, n_copies)
        for key in ("critical", "restart"):
            if part.get(key) is not None:
                part.lines.append(f"{part.name(key)}: not used here; see --on_instance_loss")
        n_servers = part.count(n_workers)
        content[_ROLES[role]] = {"num_instances": n_servers * n_copies, **routers.get(role, {}), **section}
    return content


def _srt_routers(frontend: Node) -> dict[str, dict[str, Any]]:
    """Return the router of each role that the frontend of a recipe sets."""
    routers: dict[str, dict[str, Any]] = {}
    args = frontend.child("args")
    mode = args.data.get("router-mode")
    if isinstance(mode, str) and mode in DYNAMO_ROUTERS:
        args.get("router-mode")
        routers["prefill"] = routers["agg"] = {"router": {"type": DYNAMO_ROUTERS[mode]}}
    for role, key in _SRT_ROUTERS:
        if key in frontend.data:
            routers[role] = {"router": frontend.child(key).take()}
    return routers


def llm_api_file(node: Node, key: str) -> dict[str, Any]:
    """Return the settings of a server, from the file that a recipe names with its path in a container."""
    name = node.text(key)
    copy = Path(node.source).parent / Path(name).name
    file = next((path for path in (Path(name), copy) if path_exists(path)), None)
    if file is None:
        raise ConfigError(
            f"{node.where(key)} {name}: no such file; it has the sizes of a server (tensor_parallel_size, …):"
            f" copy it to {copy}"
        )
    return plain(read(read_text(str(file)), str(file)), str(file))


def _is_dynamo(data: Mapping[str, Any]) -> bool:
    cluster = data.get(DISCOVERY)
    return isinstance(cluster, Mapping) and "num_prefill_workers" in cluster


def _dynamo(node: Node) -> dict[str, Any]:
    cluster = node.child(DISCOVERY)
    content: dict[str, Any] = {}
    for role, section in (("prefill", _CTX), ("decode", _GEN)):
        worker = node.child(role)
        settings = llm_api_file(worker, "config")
        check_gpus(worker, "gpus_per_worker", settings)
        content[section] = {"num_instances": cluster.count(f"num_{role}_workers"), **settings}
    return content


def _is_sflow(data: Mapping[str, Any]) -> bool:
    variables = data.get("variables")
    return isinstance(variables, Mapping) and not variables.keys().isdisjoint(("TRTLLM_YAML", _SFLOW[0][2]))


# By section: the variables of the number of servers, of their GPUs, and of their file.
_SFLOW = (
    (_CTX, "NUM_CTX_SERVERS", "TRTLLM_YAML_CTX", "GPUS_PER_CTX_RANK"),
    (_GEN, "NUM_GEN_SERVERS", "TRTLLM_YAML_GEN", "GPUS_PER_GEN_RANK"),
    (_EXECUTORS, "DP_MULTIPLICITY", "TRTLLM_YAML", "GPUS_PER_DP_RANK"),
)


def _sflow(node: Node) -> dict[str, Any]:
    variables = node.child("variables")
    content: dict[str, Any] = model_of(variables.child("MODEL_PATH"), "value")
    for section, number, file, gpus in _SFLOW:
        if file in variables.data:
            settings = llm_api_file(variables.child(file), "value")
            check_gpus(variables.child(gpus), "value", settings)
            n_servers = variables.child(number).count("value")
            content[section] = {"num_instances": n_servers, **settings}
    return content


def _is_llm_d(data: Mapping[str, Any]) -> bool:
    return any(
        is_mapping(data, role) and not {"containers", "parallelism", "extra-args"}.isdisjoint(data[role])
        for role in _LLM_D_ROLES
    )


def _llm_d(node: Node) -> dict[str, Any]:
    content: dict[str, Any] = model_of(node.child("modelArtifacts"), "uri")
    roles = {role: node.child(role) for role in _LLM_D_ROLES if node.data.get(role) is not None}
    roles = {role: server for role, server in roles.items() if server.get("create") is not False}
    for role, server in roles.items():
        if server.data.get("replicas") is None:
            raise ConfigError(
                f"{server.where('replicas')}: missing; add the number of servers and the GPUs of each:"
                f"\n{role}:\n  replicas: 2\n  parallelism: {{tensor: 4}}"
            )
        n_servers, parallelism = server.count("replicas"), server.child("parallelism")
        flags = {
            "tensor-parallel-size": server.count("tp", default=parallelism.count("tensor", default=1)),
            "data-parallel-size": parallelism.count("data", default=1),
            "enable-expert-parallel": server.is_on("enable-expert-parallel"),
            **parsed_flags(_llm_d_args(server)),
        }
        section, _ = section_of_flags(server.child("args", flags), is_sglang=False)
        # Without prefill servers, the others compute both phases.
        content[_ROLES[role] if len(roles) == 2 else _EXECUTORS] = {"num_instances": n_servers, **section}
    return content


def _llm_d_args(server: Node) -> Sequence[Any]:
    """Return the arguments of the model server, which is the first container."""
    if server.data.get("extra-args") is not None:
        try:
            return shlex.split(server.text("extra-args"))
        except ValueError as error:
            raise ConfigError(f"{server.where('extra-args')}: {error}") from None
    containers = server.get("containers") or ()
    is_list = isinstance(containers, list) and all(isinstance(one, Mapping) for one in containers)
    if not is_list:
        raise ConfigError(
            f"{server.where('containers')}: {value_text(containers)}; must be a list of mappings"
        )
    first = server.child("containers", containers[0] if containers else {})
    args = first.get("args") or ()
    if not isinstance(args, (list, tuple)):
        raise ConfigError(f"{first.where('args')}: {value_text(args)}; must be a list")
    return args


RECIPES = (
    PublishedForm(
        "TensorRT-LLM's slurm/benchmark configuration",
        lambda data: is_mapping(data, "worker_config"),
        _trtllm_benchmark,
    ),
    PublishedForm("a recipe of srt-slurm", _has_srt_variants, _srt_variants),
    PublishedForm("a recipe of srt-slurm", _is_srt, _srt),
    PublishedForm("NVIDIA's form of a Dynamo cluster", _is_dynamo, _dynamo),
    PublishedForm("NVIDIA's form for sflow", _is_sflow, _sflow),
    PublishedForm("llm-d's values of model servers", _is_llm_d, _llm_d),
)
