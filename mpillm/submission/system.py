"""The system and measurements descriptions that the checker requires, from the runs' records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.cores.base import LLMCore
from mpillm.cores.registry import BackendRegistry
from mpillm.data.model_files import EngineConfig
from mpillm.engine.shape.find_model import PRESETS
from mpillm.files import path_exists, read_object
from mpillm.submission.rules import (
    MEASUREMENTS,
    STATUSES,
    SYSTEM_MAY_BE_EMPTY,
    SYSTEM_MEANINGFUL,
    SYSTEM_TYPES,
)
from mpillm.submission.submitted_runs import SubmittedRun

SYSTEM_FIELDS = SYSTEM_MEANINGFUL + SYSTEM_MAY_BE_EMPTY
_NOT_APPLICABLE = "N/A"
# Fields that a program without privileges cannot detect. The checker requires a text in each.
_NOT_DETECTED = (
    *("host_memory_configuration", "host_networking_topology", "accelerator_host_interconnect"),
    *("accelerator_memory_configuration", "accelerator_interconnect", "cooling"),
)


def system_description(run: SubmittedRun, submitter: str, division: str, system_name: str) -> dict[str, Any]:
    """Return the content of ``systems/<system>.json``.

    Raises ConfigError for unreadable files, or nodes that differ.
    """
    machine = _one_kind(run)
    cpu, gpus = machine["cpu"], machine["gpus"]
    n_gpus = max(_used_gpus(run.workers).values()) if gpus else 0
    cards = sorted(Counter(card["type"] for card in machine["network"]).items())
    disks = dict.fromkeys(disk["type"] for disk in machine["storage"]["disks"])
    return {
        "division": division,
        "submitter": submitter,
        "status": "available",
        "system_type": run.workload.submission.system_type,
        "system_name": system_name,
        "number_of_nodes": len(run.machines),
        "host_processor_model_name": cpu["model"] or _NOT_APPLICABLE,
        "host_processors_per_node": cpu["sockets"],
        "host_processor_core_count": cpu["cores"] // cpu["sockets"],
        "host_processor_frequency": f"{cpu['max_mhz']} MHz" if cpu["max_mhz"] else "",
        "host_processor_caches": ", ".join(cpu["caches"]),
        "host_processor_interconnect": "",
        "host_memory_capacity": _gib(machine["memory_bytes"]),
        "host_storage_capacity": _gib(machine["storage"]["bytes"]),
        "host_storage_type": ", ".join(disks) or _NOT_APPLICABLE,
        "host_networking": ", ".join(map(_card, machine["network"])) or _NOT_APPLICABLE,
        "host_network_card_count": ", ".join(f"{n}x {kind}" for kind, n in cards) or _NOT_APPLICABLE,
        # A number as text, because the checker treats the number 0 as a missing value.
        "accelerators_per_node": str(n_gpus),
        "accelerator_model_name": gpus[0]["name"] if n_gpus else _NOT_APPLICABLE,
        "accelerator_memory_capacity": _gib(gpus[0]["memory_bytes"]) if n_gpus else _NOT_APPLICABLE,
        "accelerator_frequency": "",
        "accelerator_interconnect_topology": "",
        "accelerator_on-chip_memories": "",
        "framework": _framework(run, machine["software"]),
        "operating_system": f"{machine['operating_system']}, kernel {machine['kernel']}",
        "other_software_stack": _stack(run, machine),
        "hw_notes": "",
        "sw_notes": "",
        "system_type_detail": _NOT_APPLICABLE,
        **dict.fromkeys(_NOT_DETECTED, _NOT_APPLICABLE),
    }


def unknown(description: Mapping[str, Any]) -> list[str]:
    """Return the fields that the submitter should fill in."""
    without_gpus = description["accelerators_per_node"] == "0"
    return [
        name
        for name, value in description.items()
        if value == _NOT_APPLICABLE
        and name in SYSTEM_MEANINGFUL
        and not (without_gpus and name.startswith("accelerator_"))
    ]


def overlay(
    description: Mapping[str, Any], file: str | None, known: Iterable[str], option: str
) -> dict[str, Any]:
    """Return `description`, overridden by the JSON object in `file`.

    Raises ConfigError, with `option` and the file, for a key not in `known` or an invalid value.
    """
    if file is None:
        return dict(description)
    overrides = read_object(Path(file))
    known = tuple(known)
    for key, value in overrides.items():
        if key not in known:
            raise ConfigError(f"{option} {file}: no field '{key}'{nearest(key, known)}")
        allowed = {"status": STATUSES, "system_type": SYSTEM_TYPES}.get(key)
        if allowed and value not in allowed:
            raise ConfigError(f"{option} {file}: {key} {value!r}: not one of {', '.join(allowed)}")
        if key in SYSTEM_MEANINGFUL + MEASUREMENTS and value in ("", None, 0):
            raise ConfigError(f"{option} {file}: {key} is empty; the submission checker requires an answer")
    for key in ("submitter", "division", "system_name"):
        if key in overrides and overrides[key] != description.get(key):
            raise ConfigError(f"{option} {file}: {key} is {overrides[key]!r}, but --{key} {description[key]}")
    return {**description, **overrides}


def same_system(runs: Sequence[SubmittedRun]) -> None:
    """Raise ConfigError if the runs differ in kind or number of nodes, GPUs or versions."""
    first = runs[0]
    for other in runs[1:]:
        if difference := _difference(_system(first), _system(other)):
            raise ConfigError(f"{first.path} and {other.path} were not made on the same system: {difference}")


def measurements(run: SubmittedRun) -> dict[str, str]:
    """Return the content of ``measurements.json``; unknown values are empty."""
    config = run.directory.config
    # The options of a client do not contain the server's weights.
    weights, transformations = ("", "") if of_servers(run) else _weights(config)
    return {
        "input_data_types": "int32",
        "retraining": "N",
        "starting_weights_filename": Path(str(config.get("model_path") or "")).name,
        "weight_data_types": weights,
        "weight_transformations": transformations,
    }


def _weights(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the data type and the transformation of the weights; empty if unknown."""
    model_path = str(config.get("model_path") or "")
    engine = Path(str(config.get("engine_dir") or "")) / "config.json"
    dtype, algorithm = config.get("dtype"), str(config.get("quantization") or "")
    if (
        config.get("engine_dir")
        and path_exists(engine)
        and (built := EngineConfig.from_file(engine).pretrained_config).dtype
    ):
        dtype, algorithm = built.dtype, built.quantization.quant_algo
    else:
        model = _model(model_path)
        algorithm = algorithm if algorithm in _QUANTIZED else _algorithm(model.get("quantization_config"))
        dtype = model.get("dtype") or model.get("torch_dtype") if dtype in (None, "auto") else dtype
    if algorithm:
        return _weight_number(algorithm), f"quantization ({algorithm})"
    return (_DTYPES.get(str(dtype), str(dtype)), "none") if dtype and model_path else ("", "none")


def _weight_number(algorithm: str) -> str:
    """Return the weights' type for a TensorRT-LLM algorithm, e.g. FP8_PER_CHANNEL_PER_TOKEN or W4A16_AWQ."""
    if match := re.match(r"W(\d+)A\d+", algorithm):
        return f"int{match[1]}"
    return algorithm.partition("_")[0].lower()


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_QUANTIZED = ("int8", "fp8")


def _model(model_path: str) -> dict[str, Any]:
    """Return the config.json of the model's folder or preset; empty if it is not on this machine."""
    files = (Path(model_path) / "config.json", PRESETS / f"{model_path}.json")
    return next((read_object(file) for file in files if model_path and path_exists(file)), {})


def _algorithm(quantization: Mapping[str, Any] | None) -> str:
    """Return the name of a checkpoint's quantization; for compressed-tensors, the type of number."""
    if not quantization:
        return ""
    for group in quantization.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        kind = {"int": "int", "float": "fp"}.get(str(weights.get("type")), "")
        return f"{kind}{weights.get('num_bits', '')}"
    return str(quantization.get("quant_algo") or quantization.get("quant_method") or "")


def _used_gpus(workers: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the number of GPUs that ranks and their servers used on each node."""
    used = Counter[str]()
    for worker in workers:
        used[worker["node"]] += len(worker.get("server_devices", ())) or worker["device"] is not None
    return used


def _one_kind(run: SubmittedRun) -> dict[str, Any]:
    """Return the description that all nodes with workers share."""
    machines = list(run.machines.values())
    for node, machine in run.machines.items():
        if difference := _difference(machines[0], machine):
            raise ConfigError(
                f"{run.path}: the nodes are not alike ({node}: {difference}); "
                "a submission describes one kind of node"
            )
    first: dict[str, Any] = machines[0]
    return first


def _system(run: SubmittedRun) -> dict[str, Any]:
    return {
        **_one_kind(run),
        "nodes": len(run.machines),
        "workers": len(run.workers),
        "versions": run.versions,
    }


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the first entry that differs, with both values. Storage and network may differ."""
    for key in dict.fromkeys((*a, *b)):
        first, second = a.get(key), b.get(key)
        if first == second or key in ("storage", "network"):
            continue
        if isinstance(first, dict) and isinstance(second, dict):
            return f"{key}: {_difference(first, second)}"
        return f"{key} {first} and {second}"
    return ""


def _gib(n: int) -> str:
    return f"{n / 2**30:.0f} GiB"


def _card(card: Mapping[str, Any]) -> str:
    speed = card["mbit_per_s"]
    return f"{card['type']} {speed / 1000:g} Gbit/s" if speed else str(card["type"])


def of_servers(run: SubmittedRun) -> bool:
    """Return whether the run measured servers. Its options then do not describe their weights."""
    core = _core(run)
    return core is not None and core.is_client


def _core(run: SubmittedRun) -> type[LLMCore] | None:
    """Return the run's core; None for a plug-in that is not installed on this machine."""
    try:
        return BackendRegistry.declared(str(run.directory.config["core_type"]))
    except ConfigError:
        return None


def _framework(run: SubmittedRun, software: Mapping[str, str]) -> str:
    """Return the name of the framework; N/A for servers that do not report it."""
    core = _core(run)
    if of_servers(run):
        frameworks = [instance.get("frameworks") for instance in run.directory.result["per_instance"]]
        names = {name for names in frameworks for name in names or ()}
        return ", ".join(sorted(names)) if names and all(frameworks) else _NOT_APPLICABLE
    if core is None or core.framework is None:
        return f"mpillm, core {run.directory.config['core_type']}"
    return " ".join([core.framework, *(software[name] for name in core.packages[:1] if name in software)])


def _stack(run: SubmittedRun, machine: Mapping[str, Any]) -> str:
    parts = [f"mpillm {run.versions['mpillm']}", run.versions["MPI"], f"Python {run.versions['Python']}"]
    core = _core(run)
    framework = core.packages[:1] if core else ()
    parts += [f"{name} {version}" for name, version in machine["software"].items() if name not in framework]
    if machine["gpu_driver"]:
        parts.append(f"NVIDIA driver {machine['gpu_driver']}")
    return ", ".join(parts)
