"""Options and flags that mean the same get one value, whichever of them was set."""

from __future__ import annotations

from collections.abc import Mapping

from disagg.errors import ConfigError, nearest
from mpillm import fields
from mpillm.configurator import DEFAULT, Field, Found, Level, Origin
from mpillm.fields.flags import BUILD_OPTIONS, RUNTIME_FLAGS, RUNTIME_OPTIONS, TENSORRT_ONLY

OWN_CORES = ("torch", "dummy")  # TensorRT-LLM's are passed what they are given


def unify(found: dict[str, Found]) -> None:
    """Give an option and its flag the value of the higher source: of the option, where they are alike. Other runtime flags get their
    defaults; flags that are options and nothing else are taken out.

    `found` holds every field, by name. ConfigError, which names the source, for a flag that the core does not have or can't honour,
    for a value that is none, and for two that exclude each other.
    """
    core_type = found["core_type"].value
    if core_type in OWN_CORES:
        _check_honoured(core_type, found["trtllm_runtime_flags"])
    _share(found, "trtllm_runtime_flags", RUNTIME_FLAGS)
    _take_out(found, "trtllm_runtime_flags", RUNTIME_OPTIONS)
    _take_out(found, "trtllm_build_flags", BUILD_OPTIONS)
    if core_type in OWN_CORES:
        _batch_to_the_end(found)


def _check_honoured(core_type: str, flags: Found) -> None:
    for name, value in flags.value.items():
        where = f"{flags.key_origins()[name].where}: trtllm_runtime_flags {name}"
        if name in RUNTIME_OPTIONS:
            continue
        if name not in RUNTIME_FLAGS:
            there_are = ", ".join(RUNTIME_FLAGS)
            raise ConfigError(f"{where}: the {core_type} core has no such flag{nearest(name, RUNTIME_FLAGS)}; it has {there_are}")
        if value is None or RUNTIME_FLAGS[name].check(value, where) == RUNTIME_FLAGS[name].default:
            continue
        if name in TENSORRT_ONLY:
            raise ConfigError(f"{where} {value}: has no effect on the {core_type} core: it is TensorRT-LLM's alone")
        if name == "exclude_input_from_output":
            raise ConfigError(f"{where} {value}: the {core_type} core answers without the prompt, as LoadGen wants it")


def _share(found: dict[str, Found], flags_name: str, known: Mapping[str, Field]) -> None:
    flags = found[flags_name]
    values, origins = dict(flags.value), flags.key_origins()
    for name, field in known.items():
        flag = None
        candidates = [found.get(field.name, Found(field.default, DEFAULT))]
        if values.get(name) is not None:
            value = field.check(values[name], f"{origins[name].where}: {flags_name} {name}")
            candidates.append(flag := _called(flags_name, Found(value, origins[name])))
        if field is fields.max_batch_size and (size := _batch_size(found)) is not None:
            candidates.append(_called("gpu_batch_size", size))
        best = max(candidates, key=lambda candidate: candidate.origin.level)
        if best.value is None:
            continue
        values[name] = best.value
        if best is not flag:
            origins[name] = best.origin
        if field.name in found:
            found[field.name] = best
    found[flags_name] = Found(values, flags.origin, origins)


def _take_out(found: dict[str, Found], flags_name: str, options: Mapping[str, Field]) -> None:
    flags = found[flags_name]
    for name, option in options.items():
        mine, origin = found[option.name], flags.key_origins().get(name)
        where = "" if origin is None else f"{origin.where}: {flags_name} {name}"
        if origin is not None and origin.level is mine.origin.level and option.check(flags.value[name], where) != mine.value:
            raise ConfigError(f"{where} is {flags.value[name]}, but {option.name} is {mine.value} ({mine.origin.where})")
    _share(found, flags_name, options)
    flags = found[flags_name]
    values = {name: value for name, value in flags.value.items() if name not in options}
    found[flags_name] = Found(values, flags.origin, {name: origin for name, origin in flags.keys.items() if name in values})


def _called(name: str, found: Found) -> Found:
    """Its source, and the other name that it has there."""
    return Found(found.value, Origin(found.origin.level, f"{found.origin.where}: {name}"))


def _batch_size(found: Mapping[str, Found]) -> Found | None:
    """gpu_batch_size for this workload, if it says one."""
    sizes = found["gpu_batch_size"]
    if not isinstance(sizes.value, dict):
        return None if sizes.value is None else sizes
    workloads: tuple[str, ...] = found["benchmarks"].value or ()
    return Found(sizes.value[workloads[0]], sizes.origin) if len(workloads) == 1 and workloads[0] in sizes.value else None


def _batch_to_the_end(found: dict[str, Found]) -> None:
    """use_inflight_batching:false is the scheduler policy `static`."""
    flags, policy = found["trtllm_runtime_flags"], found["batch_scheduler_policy"]
    if flags.value["use_inflight_batching"] or policy.value == "static":
        return
    origin = flags.keys["use_inflight_batching"]
    if policy.origin.level >= Level.CONTEXT:
        raise ConfigError(
            f"{origin.where}: trtllm_runtime_flags use_inflight_batching false excludes batch_scheduler_policy {policy.value}"
            f" ({policy.origin.where})"
        )
    found["batch_scheduler_policy"] = _called("use_inflight_batching", Found("static", origin))
    keys = {**flags.keys, "batch_scheduler_policy": origin}
    found["trtllm_runtime_flags"] = Found({**flags.value, "batch_scheduler_policy": "static"}, flags.origin, keys)
