"""How the value of an option is found.

`Level` has the order of the sources; `resolve` finds each option in them, under all its names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from mpillm.config.flags import LIMITS, check_values, lay_over, limits_of_engine, renamed
from mpillm.configurator import Field
from mpillm.configurator.found import DEFAULT, Found, Level, Origin
from mpillm.core_names import TRTLLM
from mpillm.fields import BY_NAME
from mpillm.fields.checkpoint import CheckpointFields
from mpillm.fields.engine_build import BuildFields
from mpillm.fields.general import GeneralFields
from mpillm.fields.harness_stage import HarnessFields
from mpillm.fields.model import ModelFields
from mpillm.fields.own_servers import OwnServerFields
from mpillm.fields.runtime_flags import BUILD_OPTIONS, RUNTIME_FLAGS, RUNTIME_OPTIONS
from mpillm.fields.topology import TopologyFields
from mpillm.servers.kinds import kind_of
from mpillm.workloads import plain_form

_RUNTIME, _BUILD = HarnessFields.trtllm_runtime_flags.name, BuildFields.trtllm_build_flags.name
_CHECKPOINT = CheckpointFields.trtllm_checkpoint_flags.name


class _Meaning(NamedTuple):
    """A value of an option that implies another option's."""

    field: Field
    value: Any
    other: Field
    its_value: Any


# In this order: one may follow from another.
_MEANINGS = (
    _Meaning(GeneralFields.use_triton, True, GeneralFields.harness_type, "triton"),
    _Meaning(GeneralFields.harness_type, "triton", TopologyFields.core_type, "triton_grpc"),
    _Meaning(TopologyFields.core_type, "trtllm_disagg", TopologyFields.mode, "disaggregated"),
)
# By --precision: qformat of TensorRT-LLM's quantisation, and --quantization of cores that run here.
_PRECISIONS = {
    "fp4": ("nvfp4", None),
    "nvfp4": ("nvfp4", None),
    "fp8": ("fp8", "fp8"),
    **dict.fromkeys(("fp16", "bf16", "fp32"), ("full_prec", "none")),
}


def resolve(stated: Mapping[str, Found]) -> dict[str, Found]:
    """Return the values in force, by name, from what is `stated` of every field.

    An option and its other names get one value: that of the highest source, and within a source the option's
    own. Runtime flags get their defaults; flags that are only options are taken out. ConfigError names the
    source: of a value that a flag can't have here, and of two values that exclude
    each other.
    """
    found = dict(stated)
    lay_over(found)
    if server := found[OwnServerFields.server.name].value:
        _imply(found, OwnServerFields.server, server, TopologyFields.core_type, kind_of(server).core_type)
    for meaning in _MEANINGS:
        _imply(found, *meaning)
    found[_RUNTIME] = renamed(found[_RUNTIME], _RUNTIME)
    if found["precision"].value is not None:
        _quantise(found)
    core_type = found["core_type"].value
    is_own = core_type not in TRTLLM
    if is_own:
        check_values(core_type, found[_RUNTIME])
    size = _batch_size(found)
    _share(
        found,
        _RUNTIME,
        RUNTIME_FLAGS,
        {} if size is None else {ModelFields.max_batch_size: _called("gpu_batch_size", size)},
    )
    _engine_batch(found, size)
    _share(found, _RUNTIME, RUNTIME_OPTIONS, only_options=True)
    _share(found, _BUILD, BUILD_OPTIONS, only_options=True)
    _limits_of_the_engine(found)
    if is_own and not found[_RUNTIME].value["use_inflight_batching"]:
        _batch_to_the_end(found)
    return found


def _imply(found: dict[str, Found], field: Field, value: Any, other: Field, its_value: Any) -> None:
    """Raise ConfigError if the user set the other option otherwise, in whatever source."""
    cause, effect = found[field.name], found[other.name]
    if cause.value != value or effect.value == its_value:
        return
    if effect.origin.level >= Level.CONTEXT:
        raise ConfigError(
            f"{field.name} {value} ({cause.origin.where}) means {other.name} {its_value},"
            f" but that is {effect.value} ({effect.origin.where})"
        )
    found[other.name] = _called(field.name, Found(its_value, cause.origin))


def _quantise(found: dict[str, Found]) -> None:
    """Apply --precision: to checkpoints and, unless a higher source states quantization, our cores."""
    precision, flags = found["precision"], found[_CHECKPOINT]
    qformat, algorithm = _PRECISIONS[precision.value]
    said = flags.key("qformat")
    if _means(precision, f"qformat {qformat} among {_CHECKPOINT}", qformat, said):
        found[_CHECKPOINT] = flags.with_key("qformat", _called("precision", Found(qformat, precision.origin)))
    if found["core_type"].value in TRTLLM or algorithm is None:
        return  # `check_core` refuses a precision that the core lacks; other commands may read the same file
    if _means(precision, f"quantization {algorithm}", algorithm, found["quantization"]):
        found["quantization"] = _called("precision", Found(algorithm, precision.origin))


def _means(precision: Found, meaning: str, value: str, other: Found) -> bool:
    """Return whether `other` is from a lower source, so that the meaning holds.

    ConfigError if it is another value from the same source.
    """
    if other.value not in (None, value) and other.origin.level is precision.origin.level:
        raise ConfigError(
            f"precision {precision.value} ({precision.origin.where}) means {meaning}, but that is"
            f" {other.value} ({other.origin.where})"
        )
    return other.origin.level < precision.origin.level


def _share(
    found: dict[str, Found],
    flags_name: str,
    keys: Mapping[str, Field],
    others: Mapping[Field, Found] | None = None,
    only_options: bool = False,
) -> None:
    """Give each key of flags, which is another name of an option, and that option one value.

    `others`: what else states an option's value. With `only_options` the keys are taken out; a key and an
    option that differ, both from one source, are an error.
    """
    flags = found[flags_name]
    for key, field in keys.items():
        option, flag, alias = found.get(field.name, Found(field.default, DEFAULT)), flags.key(key), None
        if flag.value is not None:
            where = f"{flag.origin.where}: {flags_name} {key}"
            flag = Found(field.check(flag.value, where), flag.origin)
            alias = _called(flags_name, flag)
            if only_options and flag.origin.level is option.origin.level and flag.value != option.value:
                raise ConfigError(
                    f"{where} is {flag.value}, but {field.name} is {option.value} ({option.origin.where})"
                )
        candidates = (option, alias, (others or {}).get(field))
        # the first of those that are alike
        best = max(filter(None, candidates), key=lambda candidate: candidate.origin.level)
        if field.name in found:
            found[field.name] = best
        if only_options:
            flags = flags.without_key(key)
        elif best.value is not None:
            flags = flags.with_key(key, flag if best is alias else best)
    found[flags_name] = flags


def _called(name: str, found: Found) -> Found:
    """Return its source, and the other name that it has there."""
    return Found(found.value, Origin(found.origin.level, f"{found.origin.where}: {name}"))


def _batch_size(found: Mapping[str, Found]) -> Found | None:
    """Apply gpu_batch_size for this workload, if it has one."""
    sizes = found["gpu_batch_size"]
    if not isinstance(sizes.value, dict):
        return None if sizes.value is None else sizes
    workloads: tuple[str, ...] = found["benchmarks"].value or ()
    if len(workloads) != 1:
        return None
    size = sizes.value.get(workloads[0], sizes.value.get(plain_form(workloads[0])))
    return None if size is None else Found(size, sizes.origin)


def _engine_batch(found: dict[str, Found], size: Found | None) -> None:
    """Build an engine for gpu_batch_size, even if the run's flags beside it state less."""
    run, flags = found["max_batch_size"], found[_BUILD]
    if size is None or run.value is None or "max_batch_size" in flags.value:
        return
    if size.value > run.value and size.origin.level >= run.origin.level:
        found[_BUILD] = flags.with_key("max_batch_size", _called("gpu_batch_size", size))


def _limits_of_the_engine(found: dict[str, Found]) -> None:
    """Set a limit of the run that nothing states to the one that the engine is built for."""
    stated = {name: found[name].value for name in LIMITS}
    for name, built in limits_of_engine(stated, found[_BUILD].value).items():
        where = f"{found[_BUILD].key(name).origin.where}: {_BUILD}"
        found[name] = limit = Found(
            BY_NAME[name].check(built, f"{where} {name}"), Origin(Level.DEFAULT, where)
        )
        found[_RUNTIME] = found[_RUNTIME].with_key(name, limit)


def _batch_to_the_end(found: dict[str, Found]) -> None:
    """use_inflight_batching:false is the scheduler policy `static`."""
    policy, origin = found["batch_scheduler_policy"], found[_RUNTIME].keys["use_inflight_batching"]
    if policy.value == "static":
        return
    if policy.origin.level >= Level.CONTEXT:
        raise ConfigError(
            f"{origin.where}: {_RUNTIME} use_inflight_batching false excludes batch_scheduler_policy"
            f" {policy.value} ({policy.origin.where})"
        )
    found["batch_scheduler_policy"] = _called("use_inflight_batching", Found("static", origin))
    found[_RUNTIME] = found[_RUNTIME].with_key("batch_scheduler_policy", Found("static", origin))
