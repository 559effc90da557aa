"""Deploy files of Dynamo: Kubernetes manifests of kind DynamoGraphDeployment, versions v1alpha1 and v1beta1.

Source: deploy/operator/api/ of ai-dynamo/dynamo. v1alpha1 has a mapping `services`, v1beta1 a list
`components`. A worker's engine, sizes and role are in the command line of its container.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from disagg.schema import MAPPING, SECTIONS, checked
from disagg.yaml_text import plain, read, value_text
from mpillm.options.published_forms import DYNAMO_ROUTERS, PublishedForm, llm_api_file
from mpillm.options.published_servers import Node, model_of, n_ranks_of, parsed_flags, section_of_flags

_CTX, _GEN, _EXECUTORS = SECTIONS
_KIND = "DynamoGraphDeployment"
_OTHERS = "other documents"
_ENGINES = ("vllm", "sglang", "trtllm")
_ROLES = _PREFILL, _DECODE = ("prefill", "decode")
_WORKERS = ("worker", "main", *_ROLES)  # types of components
_PARTS = ("frontend", "planner", "router", "global_router", "global_planner")  # other modules
_SHELLS = ("sh", "bash", "dash")
_GPU = ("gpu", "nvidia.com/gpu")
# Flags of dynamo.trtllm that correspond to a key of a section.
_TRTLLM_FLAGS: dict[str, tuple[str, ...]] = {
    "tensor-parallel-size": ("tensor_parallel_size",),
    "pipeline-parallel-size": ("pipeline_parallel_size",),
    "expert-parallel-size": ("moe_expert_parallel_size",),
    "enable-attention-dp": ("enable_attention_dp",),
    "max-batch-size": ("max_batch_size",),
    "max-num-tokens": ("max_num_tokens",),
    "max-seq-len": ("max_seq_len",),
    "free-gpu-memory-fraction": ("kv_cache_config", "free_gpu_memory_fraction"),
    "kv-block-size": ("kv_cache_config", "tokens_per_block"),
}
_FILE, _OVERRIDE = "extra-engine-args", "override-engine-args"
_CONFIG = "config"  # a file with flags of vLLM or SGLang
# Variables may contain others, so their values could grow without a limit.
_MAX_VALUE, _MAX_VARIABLES, _MAX_ARGV = 4096, 100, 1 << 20  # characters, in a word, characters
# ${NAME}, ${NAME:-default} and $NAME of a shell, $(NAME) of Kubernetes.
_VARIABLE = re.compile(r"\$(?:\{(\w{1,100})(?::-([^{}$]{0,200}))?\}|\((\w{1,100})\)|(\w{1,100}))")


class _Worker(NamedTuple):
    node: Node  # the component
    container: Node
    engine: str
    flags: Node
    role: str  # prefill, decode, or "" for both phases


def with_others(documents: Sequence[Any]) -> dict[str, Any]:
    """Return a file's graph deployment, with the file's other documents; {} if it has none."""
    mappings = [one for one in documents if isinstance(one, Mapping)]
    graph = next((one for one in mappings if _is_graph(one)), None)
    return {} if graph is None else {**graph, _OTHERS: [one for one in mappings if one is not graph]}


def _is_graph(data: Mapping[str, Any]) -> bool:
    return data.get("kind") == _KIND and "apiVersion" in data


def _graph(node: Node) -> dict[str, Any]:
    for key in ("apiVersion", "kind"):
        node.get(key)
    others = _mappings(node, _OTHERS)
    if any(map(_is_graph, others)):
        raise ConfigError(f"it has several documents of kind {_KIND}; write one of them as a file of its own")
    spec = node.child("spec")
    variables = _variables(spec, {})
    components = list(_components(spec))
    workers = [
        worker for component in components if (worker := _worker(component, variables, others)) is not None
    ]
    if not workers:
        names = ", ".join(filter(None, (one.path for one in components))) or "none"
        raise ConfigError(
            f"no component runs python3 -m dynamo.{{{','.join(_ENGINES)}}} (components: {names});"
            " render a patch or a template first, for example by kubectl kustomize"
        )
    content: dict[str, Any] = {}
    has_prefill = any(worker.role == _PREFILL for worker in workers)
    router = _router(components)
    for worker in workers:
        section = _section(worker, others)
        # Without prefill workers, the others compute both phases; beside them, workers without a role decode.
        if has_prefill and worker.role != _PREFILL:
            _add(content, _GEN, section, worker)
        else:
            _add(content, _CTX if has_prefill else _EXECUTORS, {**router, **section}, worker)
    models = [model for worker in workers for model in _models(worker)]
    if len({*models}) > 1:
        raise ConfigError(f"its workers have different models: {', '.join(dict.fromkeys(models))}")
    _add_lines(spec, components, workers, others)
    return {**({"model": models[0]} if models else {}), **content}


FORM = PublishedForm("a deploy file of Dynamo", _is_graph, _graph)


def _components(spec: Node) -> Iterator[Node]:
    """Yield the components of a graph. Their unread keys are named once for all."""
    if spec.data.get("components") is not None:
        for index, data in enumerate(_mappings(spec, "components")):
            component = Node(data, spec.source, f"components.{data.get('name', index)}")
            component.get("name")
            yield component
        return
    services = spec.child("services")
    for name in services.take():
        data = checked(services.where(name), services.data[name] or {}, MAPPING)
        yield Node(data, spec.source, f"services.{name}")


def _mappings(node: Node, key: str) -> list[Mapping[str, Any]]:
    """Return the list of mappings under `key`; empty if there is none."""
    values = node.get(key) or []
    if not isinstance(values, list) or not all(isinstance(one, Mapping) for one in values):
        raise ConfigError(f"{node.where(key)}: {value_text(values)}; must be a list of mappings")
    return values


def _variables(node: Node, known: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with a value that a mapping sets."""
    variables: dict[str, str] = {}
    for one in (*_mappings(node, "envs"), *_mappings(node, "env")):
        if isinstance(name := one.get("name"), str) and one.get("value") is not None:
            value = _expanded(str(one["value"]), {**known, **variables})
            variables[name] = value if len(value) <= _MAX_VALUE else str(one["value"])[:_MAX_VALUE]
    return variables


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables by their values. A variable without a value stays."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3] or match[4]
        return variables.get(name, match[0] if match[2] is None else match[2])

    return _VARIABLE.sub(value, text, count=_MAX_VARIABLES)


def _container(component: Node) -> Node:
    """Return the main container of a component's pods; an empty mapping if there is none."""
    pod = (
        component.child("extraPodSpec")
        if "extraPodSpec" in component.data
        else component.child("podTemplate")
    )
    if "spec" in pod.data:
        pod = pod.child("spec")
    if "mainContainer" in pod.data:
        return pod.child("mainContainer")
    containers = _mappings(pod, "containers")
    main = next((one for one in containers if one.get("name") == "main"), containers[0] if containers else {})
    container = pod.child("containers", main)
    container.get("name")
    return container


def _argv(container: Node, variables: Mapping[str, str]) -> list[str]:
    """Return the command line of a container; from a shell's script, all words of the script.

    Raises ConfigError for a script whose quotes are not closed.
    """
    parts: list[str] = []
    for key in ("command", "args"):
        value = container.get(key) or []
        if not isinstance(value, (list, str)):
            raise ConfigError(f"{container.where(key)}: {value_text(value)}; must be a list of strings")
        parts += [value] if isinstance(value, str) else map(str, value)
    if parts and PurePosixPath(parts[0]).name in _SHELLS:
        is_option = [bool(re.fullmatch(r"-[a-z]{0,9}c[a-z]{0,9}", part)) for part in parts]
        if True in is_option[:-1]:
            try:
                parts = _script(parts[is_option.index(True) + 1])
            except ValueError as error:
                raise ConfigError(f"{container.where('args')}: {error}") from None
    argv, size = list[str](), 0
    for part in parts:
        argv.append(_expanded(part, variables))
        if (size := size + len(argv[-1])) > _MAX_ARGV:
            raise ConfigError(
                f"{container.where('args')}: more than {_MAX_ARGV} characters with its variables"
            )
    return argv


def _script(text: str) -> list[str]:
    """Return the words of a shell's script; a line's end and an operator are words of their own."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    return list(lexer)


def _program(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the module of Dynamo that a command line starts, without "dynamo.", and its arguments."""
    for index, word in enumerate(argv[:-1]):
        if word == "-m" and (module := argv[index + 1]).startswith("dynamo."):
            args = argv[index + 2 :]
            end = (at for at, arg in enumerate(args) if re.fullmatch(r"[;|&\n]{1,9}|\d?>.{0,200}", arg))
            return module.removeprefix("dynamo."), list(args[: next(end, len(args))])
    return "", []


def _worker(
    component: Node, variables: Mapping[str, str], others: Sequence[Mapping[str, Any]]
) -> _Worker | None:
    """Return a component's worker; None if it is another part of Dynamo, such as the frontend."""
    container = _container(component)
    variables = {**variables, **_variables(component, variables)}
    argv = _argv(container, {**variables, **_variables(container, variables)})
    module, args = _program(argv)
    kinds = [component.get(key) for key in ("subComponentType", "type", "componentType")]
    kind = next(filter(None, kinds), None)
    where = f"{component.source}: {component.path}"
    if module not in _ENGINES:
        if kind not in _WORKERS or module in _PARTS:
            return None
        command = f"runs {' '.join(argv[:4])}" if argv else "has no command"
        raise ConfigError(f"{where}: {command}; must run python3 -m dynamo.{{{','.join(_ENGINES)}}}")
    flags = _with_dashes(parsed_flags(args))
    worker = _Worker(
        component, container, module, Node(flags, component.source, f"{component.path}.args"), ""
    )
    if module != "trtllm" and _CONFIG in flags:
        flags = {**_with_dashes(_mounted_file(worker, _CONFIG, others)), **flags}
        del flags[_CONFIG]
    mode = flags.pop("disaggregation-mode", kind)
    if mode == "encode":
        raise ConfigError(f"{where}: only encodes images; mpillm has no such servers")
    is_role = [role for role in _ROLES if flags.pop(f"is-{role}-worker", False) or role == mode]
    node = Node(flags, component.source, worker.flags.path)
    return worker._replace(flags=node, role=is_role[0] if is_role else "")


def _with_dashes(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags in the spelling of `section_of_flags`, without flags that have no value."""
    return {name.replace("_", "-"): value for name, value in flags.items() if value is not None}


def _section(worker: _Worker, others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the section of a worker's instances."""
    n_copies = 1
    if worker.engine == "trtllm":
        section = _trtllm_section(worker, others)
    else:
        section, n_copies = section_of_flags(worker.flags, worker.engine == "sglang")
    _check_gpus(worker, n_ranks_of(section) * n_copies)
    return {"num_instances": worker.node.count("replicas", default=1) * n_copies, **section}


def _trtllm_section(worker: _Worker, others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the section from the flags, then the file of LLM arguments, then the overrides."""
    flags = worker.flags
    section: dict[str, Any] = {}
    for flag, key in _TRTLLM_FLAGS.items():
        if (value := flags.get(flag)) is not None:
            into = section if len(key) == 1 else section.setdefault(key[0], {})
            into[key[-1]] = value
    if _FILE in flags.data:
        _merge(section, _mounted_file(worker, _FILE, others))
    if (overrides := flags.get(_OVERRIDE)) is not None:
        try:
            value = json.loads(str(overrides))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"{flags.where(_OVERRIDE)}: {value_text(overrides)}; must be a JSON object")
        _merge(section, plain(value, flags.where(_OVERRIDE)))
    return section


def _merge(section: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        old = section.get(key)
        section[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value


def _mounted_file(worker: _Worker, flag: str, others: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the file that a worker's flag names: from a ConfigMap of this file, or from beside this file."""
    path = PurePosixPath(worker.flags.text(flag))
    texts = {
        str(_mapping(one, "metadata").get("name")): text
        for one in others
        if one.get("kind") == "ConfigMap" and isinstance(text := _mapping(one, "data").get(path.name), str)
    }
    mounted = [name for name in _mounted_maps(worker, path) if name in texts]
    names = mounted or list(texts)
    if len(names) != 1:
        return llm_api_file(worker.flags, flag)
    worker.flags.get(flag)
    source = f"{worker.node.source}: ConfigMap {names[0]}: {path.name}"
    return plain(read(texts[names[0]], source), source)


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under `key`; empty if there is none."""
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _mounted_maps(worker: _Worker, path: PurePosixPath) -> list[str]:
    """Return the names of the ConfigMaps that a worker mounts at a folder of `path`."""
    data = worker.node.data
    pod = _mapping(data, "extraPodSpec") or _mapping(_mapping(data, "podTemplate"), "spec")
    maps = {
        str(one.get("name")): str(_mapping(one, "configMap").get("name"))
        for one in _mappings(Node(pod, worker.node.source, worker.node.path), "volumes")
    }
    mounts = _mappings(worker.container, "volumeMounts")
    return [
        maps.get(str(one.get("name")), "") for one in mounts if path.is_relative_to(str(one.get("mountPath")))
    ]


def _check_gpus(worker: _Worker, n_ranks: int) -> None:
    """Add a line if the GPUs of a worker's pods are not the number of ranks of its sizes."""
    nodes = worker.node.child("multinode").count("nodeCount", default=1)
    for owner in (worker.node, worker.container):
        limits = owner.child("resources").child("limits")
        values = [str(value) for key in _GPU if (value := limits.get(key)) is not None]
        if values and values[0].isdecimal() and len(values[0]) < 10 and int(values[0]) * nodes != n_ranks:
            n_gpus = f"{nodes} nodes of {values[0]} GPUs" if nodes > 1 else f"{values[0]} GPUs"
            worker.flags.lines.append(f"{worker.node.path}: {n_gpus}; by its sizes, it has {n_ranks} ranks")


def _router(components: Sequence[Node]) -> dict[str, Any]:
    """Return the router of the frontend, for the section of the servers that get the prompts."""
    for component in components:
        component = Node(component.data, component.source, component.path)  # a copy: reading it uses no key
        container = _container(component)
        variables = _variables(component, {}) | _variables(container, {})
        module, args = _program(_argv(container, variables))
        mode = parsed_flags(args).get("router-mode", variables.get("DYN_ROUTER_MODE"))
        if module in ("frontend", "") and isinstance(mode, str) and mode in DYNAMO_ROUTERS:
            return {"router": {"type": DYNAMO_ROUTERS[mode]}}
    return {}


def _models(worker: _Worker) -> list[str]:
    flags = worker.flags
    return [model for key in ("model", "model-path") for model in model_of(flags, key).values()]


def _add(content: dict[str, Any], name: str, section: dict[str, Any], worker: _Worker) -> None:
    """Add a worker's section; workers of one role must have the same sizes."""
    if (old := content.get(name)) is None:
        content[name] = section
        return
    n_instances = old["num_instances"] + section["num_instances"]
    if {**old, "num_instances": n_instances} != {**section, "num_instances": n_instances}:
        raise ConfigError(
            f"{worker.node.source}: {worker.node.path}: its settings differ from other workers in {name};"
            " keep one of them in a file of its own"
        )
    old["num_instances"] = n_instances


def _add_lines(
    spec: Node, components: Sequence[Node], workers: Sequence[_Worker], others: Sequence[Mapping[str, Any]]
) -> None:
    """Add lines with the engines, and with everything that is not used."""
    engines = dict.fromkeys(f"dynamo.{worker.engine}" for worker in workers)
    lines = [f"its workers run {', '.join(engines)}"]
    nodes = [worker.node for worker in workers]
    kinds = [str(one.get("kind")) for one in others if one.get("kind") != "ConfigMap"]
    for title, names in (
        ("components", [one.path.partition(".")[2] for one in components if one not in nodes]),
        ("documents", kinds),
        ("the workers' environment variables", _unused_variables(spec, workers)),
        ("the workers' pods", [name for node in nodes for name in node.all_unread()]),
        ("the workers' arguments", [name for worker in workers for name in worker.flags.all_unread()]),
    ):
        if names:
            lines.append(f"{title}: not used here: {', '.join(dict.fromkeys(names))}")
    spec.lines += lines + [line for worker in workers for line in worker.flags.lines]


def _unused_variables(spec: Node, workers: Sequence[_Worker]) -> list[str]:
    """Return the workers' environment variables that their command lines do not contain."""
    owners = [spec, *(one for worker in workers for one in (worker.node, worker.container))]
    names = dict.fromkeys(name for owner in owners for name in _variables(owner, {}))
    texts = [str(worker.container.data.get(key)) for worker in workers for key in ("command", "args")]
    used = {name for text in texts for match in _VARIABLE.finditer(text) for name in match.group(1, 3, 4)}
    return [name for name in names if name not in used]
