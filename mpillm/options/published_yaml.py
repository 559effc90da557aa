"""Published forms of a disaggregation YAML, converted to TensorRT-LLM's `disagg_config`, which mpillm reads.

`_FORMS` lists the forms. A conversion reads a file through `_Node`, which records the keys that are read.
Every other key is named in a line, so that no setting is dropped silently.
"""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import disagg
from disagg import DisaggConfig
from disagg.config import EXAMPLE
from disagg.errors import ConfigError
from disagg.llm_args import LLM_ARGUMENTS
from disagg.schema import BOOLEAN, COUNT, DISCOVERY, MAPPING, RUN_WIDE, SECTIONS, SERVER, checked
from disagg.text_file import read_text
from disagg.yaml_text import plain, read, value_text
from mpillm.files import path_exists
from mpillm.options.columns import INDENT, WIDTH
from mpillm.programs.load_clients.client_files import check_no_client_file

_CTX, _GEN, _EXECUTORS = SECTIONS
_ROLES = {"prefill": _CTX, "decode": _GEN, "agg": _EXECUTORS}
_TEXT = RUN_WIDE["model"]
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_REUSE = ("kv_cache_config", "enable_block_reuse")
# Flags of vLLM and SGLang, without dashes in front, that correspond to a key of a section.
_FLAGS: dict[str, tuple[str, ...]] = {
    "pipeline-parallel-size": ("pipeline_parallel_size",),
    "pp-size": ("pipeline_parallel_size",),
    "max-num-seqs": ("max_batch_size",),
    "max-running-requests": ("max_batch_size",),
    "max-num-batched-tokens": ("max_num_tokens",),
    "max-model-len": ("max_seq_len",),
    "context-length": ("max_seq_len",),
    "gpu-memory-utilization": ("kv_cache_config", "free_gpu_memory_fraction"),
    "mem-fraction-static": ("kv_cache_config", "free_gpu_memory_fraction"),
    "kv-cache-dtype": ("kv_cache_config", "dtype"),
    "block-size": ("kv_cache_config", "tokens_per_block"),
    "page-size": ("kv_cache_config", "tokens_per_block"),
    "max-total-tokens": ("kv_cache_config", "max_tokens"),
    "dtype": ("dtype",),
}
_LOAD = "load-format"
_SWITCHES = {
    "enable-prefix-caching": (_REUSE, True),
    "no-enable-prefix-caching": (_REUSE, False),
    "disable-radix-cache": (_REUSE, False),
    "enable-chunked-prefill": (("enable_chunked_prefill",), True),
    "no-enable-chunked-prefill": (("enable_chunked_prefill",), False),
}
_ENGINES = _TRTLLM, _VLLM, _SGLANG = ("trtllm", "vllm", "sglang")  # the last is srt-slurm's default
_SRT_ROUTERS = ("prefill", "ctx_router"), ("decode", "gen_router")
_DYNAMO_ROUTERS = {"kv": "kv_cache_aware", "round-robin": "round_robin"}
_LLM_D_ROLES = ("prefill", "decode")
_PLACEHOLDERS = "<>{}$"  # a name with one of them stands for another one
_MAX_NAMES = 5  # in a message
_FP8 = ("fp8_e4m3", "fp8")  # a KV cache's type in SGLang and vLLM, and in TensorRT-LLM


class _Node:
    """A mapping of a file. Raises ConfigError for a value of a wrong type."""

    def __init__(self, data: Mapping[str, Any], source: str, path: str = "") -> None:
        self.data, self.source, self.path = data, source, path
        self.lines: list[str] = []
        self._unread = dict.fromkeys(data)
        self._children: list[_Node] = []

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def where(self, key: str) -> str:
        """Return the place of a key, for errors."""
        return f"{self.source}: {self.name(key)}"

    def get(self, key: str) -> Any:
        self._unread.pop(key, None)
        return self.data.get(key)

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the value of the first of these names that the mapping has."""
        values = {name: value for name in names if (value := self.get(name)) is not None}
        for name, value in values.items():
            return int(checked(self.where(name), value, COUNT))
        if default is None:
            raise ConfigError(f"{self.where(names[0])}: missing; must be the number of servers")
        return default

    def is_on(self, key: str) -> bool:
        value = self.get(key)
        return value is not None and checked(self.where(key), value, BOOLEAN)

    def text(self, key: str) -> str:
        return str(checked(self.where(key), self.get(key), _TEXT))

    def child(self, key: str, data: Mapping[str, Any] | None = None) -> _Node:
        """Return the mapping under `key`; it is empty if there is none. `data`: the mapping, if converted."""
        if data is None:
            value = self.get(key)
            data = checked(self.where(key), {} if value is None else value, MAPPING)
        node = _Node(data, self.source, self.name(key))
        node.lines = self.lines
        self._children.append(node)
        return node

    def take(self) -> Mapping[str, Any]:
        """Return the whole mapping."""
        self._unread.clear()
        return self.data

    def unused(self) -> Iterator[str]:
        """Yield a line for each mapping below this one that has unread keys."""
        for node in self._children:
            if node.unread:
                yield f"{node.path}: not used here: {node.unread}"
            yield from node.unused()

    @property
    def unread(self) -> str:
        """The names of the keys that are not read."""
        return ", ".join(self._unread)


class _Form(NamedTuple):
    name: str
    is_form: Callable[[Mapping[str, Any]], bool]
    # To the content of a `disagg_config`. Raises ConfigError for a file that cannot be used.
    convert: Callable[[_Node], dict[str, Any]]


def load(path: str) -> tuple[DisaggConfig, str, tuple[str, ...]]:
    """Read the disaggregation YAML at `path`, in any form.

    Returns:
        The configuration; the name of the published form, or "" for a `disagg_config`; and lines that name
        the form and the settings that are not used, of at most 78 columns unless a name is longer.

    Raises ConfigError for a file that cannot be used.
    """
    text = read_text(path)
    try:
        data = read(text, path)
    except ConfigError:
        data = dict.fromkeys(re.findall(r"^(apiVersion|kind):", text, re.MULTILINE))
        if not _is_manifest(data):  # of which a file may have several, or a template
            raise
    check_no_client_file("--disagg_config", path, data)
    if not {*SECTIONS}.isdisjoint(data):
        return disagg.from_mapping(data, path), "", ()
    data = plain(data, path)
    form = next((form for form in _FORMS if form.is_form(data)), None)
    if form is None:
        return disagg.from_mapping(data, path), "", ()
    node = _Node(data, path)
    try:
        config = disagg.from_mapping(form.convert(node), path)
    except ConfigError as error:
        raise ConfigError(f"{path} is {form.name}\n{error}") from None
    unread = f"; not used here: {node.unread}" if node.unread else ""
    lines = [f"{path} is {form.name}{unread}", *node.lines, *node.unused()]
    if config.model is None:
        lines.append("no model in it: a run needs --model_path")
    return config, form.name, tuple(map(_wrapped, lines))


def _wrapped(line: str) -> str:
    """Wrap a list of names, which may be long, also where the output is not a terminal."""
    width = WIDTH - len(INDENT)
    return textwrap.fill(
        line, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )


def _is_mapping(data: Mapping[str, Any], *keys: str) -> bool:
    return all(isinstance(data.get(key), Mapping) for key in keys)


def _model(node: _Node, key: str) -> dict[str, str]:
    """Return the model of a recipe. A name that only its cluster knows is left out, with a line."""
    if node.get(key) is None:
        return {}
    model = node.text(key).removeprefix("hf:").removeprefix("//")
    if "/" in model and "://" not in model and not any(mark in model for mark in _PLACEHOLDERS):
        return {"model": model}
    node.lines.append(f"{node.name(key)} {model}: neither a folder nor a hub name")
    return {}


def _check_gpus(node: _Node, key: str, section: Mapping[str, Any], n_copies: int = 1) -> None:
    """Add a line if a recipe's number of GPUs per server is not the number of ranks per instance."""
    if node.get(key) is None:
        return
    n_gpus, sizes = node.count(key), [section.get(size) for size in _SIZES]
    n_ranks = math.prod(size for size in sizes if type(size) is int)
    if n_gpus != n_ranks * n_copies:
        node.lines.append(
            f"{node.name(key)} {n_gpus}: by its sizes, the server has {n_ranks * n_copies} ranks"
        )


def _section_of_flags(node: _Node, is_sglang: bool) -> tuple[dict[str, Any], int]:
    """Return the section that flags of vLLM or SGLang describe, and the model copies of one server.

    With data-parallel attention, the ranks of a server share its experts, as in one TP group.
    """
    section: dict[str, Any] = {}

    def put(key: Sequence[str], value: Any) -> None:
        into = section if len(key) == 1 else section.setdefault(key[0], {})
        into[key[-1]] = value

    n_copies, tp = 1, node.count("tensor-parallel-size", "tp-size", "tp", default=1)
    dp = node.count("data-parallel-size", "dp-size", "dp", default=1)
    if is_sglang:
        shares = node.is_on("enable-dp-attention") or node.count("attn-dp-size", default=1) > 1
        n_copies = 1 if shares else dp
        ep = node.count("expert-parallel-size", "ep-size", "ep", default=1)
    else:
        shares, tp = dp > 1, tp * dp
        ep = tp if node.is_on("enable-expert-parallel") else 1
    section |= {"tensor_parallel_size": tp, "moe_expert_parallel_size": ep}
    if shares:
        section["enable_attention_dp"] = True
    for flag, key in _FLAGS.items():
        if (value := node.get(flag)) is not None:
            put(key, _FP8[1] if value == _FP8[0] else value)
    if node.data.get(_LOAD) == "dummy":  # other formats differ in the time to load only
        put(("load_format",), node.get(_LOAD))
    for flag, (key, meaning) in _SWITCHES.items():
        if node.data.get(flag) is not None:
            put(key, node.is_on(flag) is meaning)
    if (chunk := node.get("chunked-prefill-size")) is not None:
        section["enable_chunked_prefill"] = chunk != -1
        if chunk != -1:
            section["max_num_tokens"] = chunk
    return section, n_copies


def _parsed(args: Sequence[Any]) -> dict[str, Any]:
    """Return command-line arguments by flag, without its dashes; a flag without a value is True."""
    flags: dict[str, Any] = {}
    flag = ""
    for arg in map(str, args):
        if arg.startswith("--"):
            flag, equals, value = arg[2:].partition("=")
            flags[flag] = _value(value) if equals else True
        elif flag and flags[flag] is True:
            flags[flag] = _value(arg)
    return flags


def _value(text: str) -> Any:
    if re.fullmatch(r"-?\d{1,15}", text):
        return int(text)
    if re.fullmatch(r"\d{0,9}\.\d{1,9}", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


# The forms


def _trtllm_benchmark(node: _Node) -> dict[str, Any]:
    hardware, workers = node.child("hardware"), node.child("worker_config")
    content: dict[str, Any] = _model(node.child("environment"), "model_path")
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
    return _is_mapping(data, "resources", "backend") and not workers.isdisjoint(resources or ())


def _has_srt_variants(data: Mapping[str, Any]) -> bool:
    has_overrides = _is_mapping(data, "base") and any("override_" in name for name in data)
    return has_overrides or (_is_srt(data) and "sweep" in data)


def _srt_variants(node: _Node) -> dict[str, Any]:
    names = [name for name in node.data if name == "sweep" or "override_" in name][:_MAX_NAMES]
    raise ConfigError(
        f"it has several variants ({', '.join(names)}); write one of them, with the values of base,"
        " as a file of its own"
    )


def _srt(node: _Node) -> dict[str, Any]:
    for key in ("schema", "name"):
        node.get(key)
    content: dict[str, Any] = _model(node.child("model"), "path")
    servers: dict[str, tuple[_Node, str, str, _Node]] = {}  # names of two keys, and the engine's arguments
    if _is_mapping(node.data, "roles"):  # schema 2
        kind = node.child("engine").get("type") if _is_mapping(node.data, "engine") else node.get("engine")
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
            section, n_copies = _section_of_flags(args, kind != _VLLM)
        _check_gpus(part, n_gpus, section, n_copies)
        for key in ("critical", "restart"):
            if part.get(key) is not None:
                part.lines.append(f"{part.name(key)}: not used here; see --on_instance_loss")
        n_servers = part.count(n_workers)
        content[_ROLES[role]] = {"num_instances": n_servers * n_copies, **routers.get(role, {}), **section}
    return content


def _srt_routers(frontend: _Node) -> dict[str, dict[str, Any]]:
    """Return the router of each role that the frontend of a recipe sets."""
    routers: dict[str, dict[str, Any]] = {}
    args = frontend.child("args")
    mode = args.data.get("router-mode")
    if isinstance(mode, str) and mode in _DYNAMO_ROUTERS:
        args.get("router-mode")
        routers["prefill"] = routers["agg"] = {"router": {"type": _DYNAMO_ROUTERS[mode]}}
    for role, key in _SRT_ROUTERS:
        if key in frontend.data:
            routers[role] = {"router": frontend.child(key).take()}
    return routers


def _llm_api_file(node: _Node, key: str) -> dict[str, Any]:
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


def _dynamo(node: _Node) -> dict[str, Any]:
    cluster = node.child(DISCOVERY)
    content: dict[str, Any] = {}
    for role, section in (("prefill", _CTX), ("decode", _GEN)):
        worker = node.child(role)
        settings = _llm_api_file(worker, "config")
        _check_gpus(worker, "gpus_per_worker", settings)
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


def _sflow(node: _Node) -> dict[str, Any]:
    variables = node.child("variables")
    content: dict[str, Any] = _model(variables.child("MODEL_PATH"), "value")
    for section, number, file, gpus in _SFLOW:
        if file in variables.data:
            settings = _llm_api_file(variables.child(file), "value")
            _check_gpus(variables.child(gpus), "value", settings)
            n_servers = variables.child(number).count("value")
            content[section] = {"num_instances": n_servers, **settings}
    return content


def _is_llm_d(data: Mapping[str, Any]) -> bool:
    return any(
        _is_mapping(data, role) and not {"containers", "parallelism", "extra-args"}.isdisjoint(data[role])
        for role in _LLM_D_ROLES
    )


def _llm_d(node: _Node) -> dict[str, Any]:
    content: dict[str, Any] = _model(node.child("modelArtifacts"), "uri")
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
            **_parsed(_llm_d_args(server)),
        }
        section, _ = _section_of_flags(server.child("args", flags), is_sglang=False)
        # Without prefill servers, the others compute both phases.
        content[_ROLES[role] if len(roles) == 2 else _EXECUTORS] = {"num_instances": n_servers, **section}
    return content


def _llm_d_args(server: _Node) -> Sequence[Any]:
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


def _is_manifest(data: Mapping[str, Any]) -> bool:
    return "apiVersion" in data and "kind" in data


def _refused(why: str) -> Callable[[_Node], dict[str, Any]]:
    """Return the conversion of a form that cannot be used."""

    def refuse(node: _Node) -> dict[str, Any]:
        raise ConfigError(f"{why}, such as\n{EXAMPLE}")

    return refuse


_FORMS = (
    _Form(
        "TensorRT-LLM's slurm/benchmark configuration",
        lambda data: _is_mapping(data, "worker_config"),
        _trtllm_benchmark,
    ),
    _Form("a recipe of srt-slurm", _has_srt_variants, _srt_variants),
    _Form("a recipe of srt-slurm", _is_srt, _srt),
    _Form("NVIDIA's form of a Dynamo cluster", _is_dynamo, _dynamo),
    _Form("NVIDIA's form for sflow", _is_sflow, _sflow),
    _Form("llm-d's values of model servers", _is_llm_d, _llm_d),
    _Form(
        "a Kubernetes manifest",
        _is_manifest,
        _refused("it describes pods; write the numbers and sizes of its servers as two sections"),
    ),
    _Form(
        "the LLM-API options of one server (trtllm-serve --config)",
        lambda data: data.keys() <= {*LLM_ARGUMENTS, *SERVER} and not data.keys() <= {*RUN_WIDE},
        _refused("it lacks the other phase and the numbers of servers; copy its lines into a section of two"),
    ),
    _Form(
        "a list of environment variables",
        lambda data: bool(data) and all(re.fullmatch("[A-Z][A-Z0-9_]*", name) for name in data),
        _refused("export them where you start mpillm; --disagg_config needs a file with two sections"),
    ),
)
