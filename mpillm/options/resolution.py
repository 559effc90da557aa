"""How the value of an option is found.

`Level` has the order of the sources. From what they state, `RULES`, the table at the end, make the values in
force. What each rule reads and writes decides their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from mpillm.core_names import ENDPOINT_CORE, TRTLLM
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME
from mpillm.options.fields.general import GeneralFields
from mpillm.options.fields.model import ModelFields
from mpillm.options.fields.runtime_flags import BUILD_OPTIONS, RUNTIME_FLAGS, RUNTIME_OPTIONS
from mpillm.options.fields.servers import OwnServerFields
from mpillm.options.fields.stages import BuildFields, CheckpointFields, HarnessFields
from mpillm.options.fields.topology import TopologyFields
from mpillm.options.flags import LIMITS, check_values, laid_over, limits_of_engine, renamed
from mpillm.options.found import DEFAULT, Found, Level, Origin
from mpillm.programs.servers.kinds import kind_of
from mpillm.workloads import plain_form

_RUNTIME, _BUILD = HarnessFields.trtllm_runtime_flags.name, BuildFields.trtllm_build_flags.name
_CHECKPOINT = CheckpointFields.trtllm_checkpoint_flags.name

_GENERAL, _TOPOLOGY = GeneralFields, TopologyFields
_REFERENCE, _LIBRARY, _OURS = "NVIDIA's harness", "TensorRT-LLM", "mpillm"  # who says so


# By --precision: qformat of TensorRT-LLM's quantisation, and --quantization of cores that run here.
_PRECISIONS = {
    "fp4": ("nvfp4", None),
    "nvfp4": ("nvfp4", None),
    "fp8": ("fp8", "fp8"),
    **dict.fromkeys(("fp16", "bf16", "fp32"), ("full_prec", "none")),
}


class Rule(NamedTuple):
    """How values follow from others: `changes` returns the new values of options by name, from all values.

    It reads and writes no options but those that are declared, which decide when it comes (`in_order`).
    """

    name: str
    reads: Collection[str]
    writes: Collection[str]
    source: str
    """Who says so: NVIDIA's harness, TensorRT-LLM, or mpillm."""
    changes: Callable[[Mapping[str, Found]], Mapping[str, Found]]
    """Raises ConfigError for values that exclude each other, or that an option can't have here."""


def resolve(stated: Mapping[str, Found]) -> dict[str, Found]:
    """Return the values in force, by name, from what is `stated` of every field.

    An option and its other names get one value: that of the highest source, and within a source the option's
    own. Runtime flags get their defaults; flags that are only options are taken out. ConfigError names the
    source: of a value that a flag can't have here, and of two values that exclude
    each other.
    """
    found = dict(stated)
    for rule in RULES:
        found.update(rule.changes(found))
    return found


def way(stated: Mapping[str, Found], name: str) -> list[tuple[Rule, Found]]:
    """Return the rules that change an option on its way from what is `stated`, each with its new value."""
    found, changed = dict(stated), []
    for rule in RULES:
        before = found[name]
        found.update(rule.changes(found))
        if found[name] != before:
            changed.append((rule, found[name]))
    return changed


def in_order(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return rules in the order in which they apply.

    A rule that writes what another one reads comes before it. Where each writes what the other one reads, or
    both write the same, they keep their order. Raises ValueError if that is a circle.
    """
    waiting, ordered = list(rules), []
    while waiting:
        first = next(
            (one for one in waiting if not any(_before(other, one, rules) for other in waiting)), None
        )
        if first is None:
            raise ValueError(f"rules in a circle: {', '.join(one.name for one in waiting)}")
        waiting.remove(first)
        ordered.append(first)
    return tuple(ordered)


def _before(one: Rule, other: Rule, rules: Sequence[Rule]) -> bool:
    """Return whether `one` must come before the other."""
    gives, takes = ({*a.writes} & {*b.reads} for a, b in ((one, other), (other, one)))
    if bool(gives) != bool(takes):
        return bool(gives)
    both = gives or {*one.writes} & {*other.writes}
    return bool(both) and rules.index(one) < rules.index(other)


def _means_another(field: Field, value: Any, other: Field, its_value: Any, source: str) -> Rule:
    """Return the rule that a value of an option implies another option's."""
    name = f"{field.name} {Field.text(field, value)} means {other.name} {its_value}"
    changes = partial(_implied, field=field, value=value, other=other, its_value=its_value)
    return Rule(name, (field.name, other.name), (other.name,), source, changes)


def _core_of_the_server(found: Mapping[str, Found]) -> dict[str, Found]:
    """Choose the core that is a client of the servers that the run starts."""
    server = found[OwnServerFields.server.name].value
    if not server:
        return {}
    kind = kind_of(server)
    if kind.handover and found["core_type"].value == "trtllm_disagg":  # of a leader: there is none
        meant = _implied(found, _TOPOLOGY.core_type, "trtllm_disagg", _TOPOLOGY.mode, "disaggregated")
        return {**meant, "core_type": _called("server", Found(kind.core_type, found["server"].origin))}
    return _implied(found, OwnServerFields.server, server, _TOPOLOGY.core_type, kind.core_type)


def _client_of_urls(found: Mapping[str, Found]) -> dict[str, Found]:
    """Choose the core that is the client of the HTTP servers named, unless the user names a core."""
    urls, core = found[HarnessFields.trtllm_server_urls.name], found["core_type"]
    if not urls.value or core.origin.level >= Level.CONTEXT:
        return {}
    return {"core_type": _called(HarnessFields.trtllm_server_urls.name, Found(ENDPOINT_CORE, urls.origin))}


def _implied(
    found: Mapping[str, Found], field: Field, value: Any, other: Field, its_value: Any
) -> dict[str, Found]:
    """Raise ConfigError if the user set the other option otherwise, in whatever source."""
    cause, effect = found[field.name], found[other.name]
    if cause.value != value or effect.value == its_value:
        return {}
    if effect.origin.level >= Level.CONTEXT:
        raise ConfigError(
            f"{field.name} {value} ({cause.origin.where}) means {other.name} {its_value},"
            f" but that is {effect.value} ({effect.origin.where})"
        )
    return {other.name: _called(field.name, Found(its_value, cause.origin))}


def _first_names(found: Mapping[str, Found]) -> dict[str, Found]:
    """Give runtime flags their first names; raise ConfigError for values that our cores can't honour."""
    flags = renamed(found[_RUNTIME], _RUNTIME)
    if (core_type := found["core_type"].value) not in TRTLLM:
        check_values(core_type, flags)
    return {_RUNTIME: flags}


def _quantise(found: Mapping[str, Found]) -> dict[str, Found]:
    """Apply --precision: to checkpoints and, unless a higher source states quantization, our cores."""
    precision, flags, changes = found["precision"], found[_CHECKPOINT], dict[str, Found]()
    if precision.value is None:
        return changes
    qformat, algorithm = _PRECISIONS[precision.value]
    said = flags.key("qformat")
    if _means(precision, f"qformat {qformat} among {_CHECKPOINT}", qformat, said):
        changes[_CHECKPOINT] = flags.with_key(
            "qformat", _called("precision", Found(qformat, precision.origin))
        )
    if found["core_type"].value in TRTLLM or algorithm is None:
        return changes  # `check_core` refuses a precision that the core lacks; others may read the file
    if _means(precision, f"quantization {algorithm}", algorithm, found["quantization"]):
        changes["quantization"] = _called("precision", Found(algorithm, precision.origin))
    return changes


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


def _shared_runtime_flags(found: Mapping[str, Found]) -> dict[str, Found]:
    """Give runtime flags and their options one value; gpu_batch_size is a name of max_batch_size, too."""
    size = _batch_size(found)
    others = {} if size is None else {ModelFields.max_batch_size: _called("gpu_batch_size", size)}
    return _shared(found, _RUNTIME, RUNTIME_FLAGS, others)


def _shared(
    found: Mapping[str, Found],
    flags_name: str,
    keys: Mapping[str, Field],
    others: Mapping[Field, Found] = MappingProxyType({}),
    only_options: bool = False,
) -> dict[str, Found]:
    """Give each key of flags, which is another name of an option, and that option one value.

    `others`: what else states an option's value. With `only_options` the keys are taken out; a key and an
    option that differ, both from one source, are an error.
    """
    flags, changes = found[flags_name], dict[str, Found]()
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
        candidates = (option, alias, others.get(field))
        # the first of those that are alike
        best = max(filter(None, candidates), key=lambda candidate: candidate.origin.level)
        if field.name in found:
            changes[field.name] = best
        if only_options:
            flags = flags.without_key(key)
        elif best.value is not None:
            flags = flags.with_key(key, flag if best is alias else best)
    return {**changes, flags_name: flags}


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


def _engine_batch(found: Mapping[str, Found]) -> dict[str, Found]:
    """Build an engine for gpu_batch_size, even if the run's flags beside it state less."""
    size, run, flags = _batch_size(found), found["max_batch_size"], found[_BUILD]
    if size is None or run.value is None or "max_batch_size" in flags.value:
        return {}
    if size.value > run.value and size.origin.level >= run.origin.level:
        return {_BUILD: flags.with_key("max_batch_size", _called("gpu_batch_size", size))}
    return {}


def _limits_of_the_engine(found: Mapping[str, Found]) -> dict[str, Found]:
    """Set a limit of the run that nothing states to the one that the engine is built for."""
    stated = {name: found[name].value for name in LIMITS}
    flags, changes = found[_RUNTIME], dict[str, Found]()
    for name, built in limits_of_engine(stated, found[_BUILD].value).items():
        where = f"{found[_BUILD].key(name).origin.where}: {_BUILD}"
        changes[name] = limit = Found(
            BY_NAME[name].check(built, f"{where} {name}"), Origin(Level.DEFAULT, where)
        )
        changes[_RUNTIME] = flags = flags.with_key(name, limit)
    return changes


def _batch_to_the_end(found: Mapping[str, Found]) -> dict[str, Found]:
    """On our cores use_inflight_batching:false is the scheduler policy `static`."""
    policy, flags = found["batch_scheduler_policy"], found[_RUNTIME]
    if found["core_type"].value in TRTLLM or flags.value["use_inflight_batching"] or policy.value == "static":
        return {}
    origin = flags.keys["use_inflight_batching"]
    if policy.origin.level >= Level.CONTEXT:
        raise ConfigError(
            f"{origin.where}: {_RUNTIME} use_inflight_batching false excludes batch_scheduler_policy"
            f" {policy.value} ({policy.origin.where})"
        )
    return {
        "batch_scheduler_policy": _called("use_inflight_batching", Found("static", origin)),
        _RUNTIME: flags.with_key("batch_scheduler_policy", Found("static", origin)),
    }


def _names(fields: Mapping[str, Field]) -> tuple[str, ...]:
    """Return the names of fields that are options."""
    return tuple(field.name for field in fields.values() if field.name in BY_NAME)


def _time_for_the_test(found: Mapping[str, Found]) -> dict[str, Found]:
    """Give a test at least twice the time that it was told to take, where no deadline is stated."""
    least, limit = found["min_duration"], found["test_deadline"]
    if least.value is None or 2 * least.value <= limit.value or limit.origin.level >= Level.CONTEXT:
        return {}
    return {"test_deadline": _called("min_duration", Found(2 * least.value, least.origin))}


_FLAGS = (_CHECKPOINT, _BUILD, _RUNTIME)
_OF_BATCH_SIZE = ("gpu_batch_size", "benchmarks")

RULES = in_order(
    (
        Rule("the environment's flags come over a command's", _FLAGS, _FLAGS, _REFERENCE, laid_over),
        Rule(
            "server means the core that is its client",
            ("server", "core_type", "mode"),
            ("core_type", "mode"),
            _OURS,
            _core_of_the_server,
        ),
        _means_another(_GENERAL.use_triton, True, _GENERAL.harness_type, "triton", _REFERENCE),
        _means_another(_GENERAL.harness_type, "triton", _TOPOLOGY.core_type, "triton_grpc", _REFERENCE),
        _means_another(_TOPOLOGY.core_type, "trtllm_disagg", _TOPOLOGY.mode, "disaggregated", _OURS),
        Rule(
            "trtllm_server_urls mean the core that is their client",
            (HarnessFields.trtllm_server_urls.name, "core_type"),
            ("core_type",),
            _OURS,
            _client_of_urls,
        ),
        Rule(
            "other names of runtime flags mean the first",
            ("core_type", _RUNTIME),
            (_RUNTIME,),
            _LIBRARY,
            _first_names,
        ),
        Rule(
            "precision is the checkpoint's qformat, and our cores' quantization",
            ("precision", "core_type", "quantization", _CHECKPOINT),
            ("quantization", _CHECKPOINT),
            _REFERENCE,
            _quantise,
        ),
        Rule(
            "gpu_batch_size sets max_batch_size; a runtime flag and its option are one",
            (*_OF_BATCH_SIZE, _RUNTIME, *_names(RUNTIME_FLAGS)),
            (_RUNTIME, *_names(RUNTIME_FLAGS)),
            _REFERENCE,
            _shared_runtime_flags,
        ),
        Rule(
            "an engine is built for gpu_batch_size",
            (*_OF_BATCH_SIZE, "max_batch_size", _BUILD),
            (_BUILD,),
            _REFERENCE,
            _engine_batch,
        ),
        Rule(
            "runtime flags may state numbers of servers and their sizes",
            (_RUNTIME, *_names(RUNTIME_OPTIONS)),
            (_RUNTIME, *_names(RUNTIME_OPTIONS)),
            _REFERENCE,
            partial(_shared, flags_name=_RUNTIME, keys=RUNTIME_OPTIONS, only_options=True),
        ),
        Rule(
            "build flags may state the layout",
            (_BUILD, *_names(BUILD_OPTIONS)),
            (_BUILD, *_names(BUILD_OPTIONS)),
            _REFERENCE,
            partial(_shared, flags_name=_BUILD, keys=BUILD_OPTIONS, only_options=True),
        ),
        Rule(
            "a limit that nothing states is the one that the engine is built for",
            (_BUILD, _RUNTIME, *LIMITS),
            (_RUNTIME, *LIMITS),
            _OURS,
            _limits_of_the_engine,
        ),
        Rule(
            "use_inflight_batching false is the policy static",
            ("core_type", "batch_scheduler_policy", _RUNTIME),
            ("batch_scheduler_policy", _RUNTIME),
            _OURS,
            _batch_to_the_end,
        ),
        Rule(
            "a test has at least twice its min_duration, where no deadline is stated",
            ("min_duration", "test_deadline"),
            ("test_deadline",),
            _OURS,
            _time_for_the_test,
        ),
    )
)
"""How values follow from others, in the order in which the rules apply."""
