"""Rules by which an option's value follows from the values of other options.

`Source` orders the sources. `RULES`, at the end, turns the sources' values into the resolved values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from disagg.errors import ConfigError
from mpillm.core_names import ENDPOINT_CORE, TRTLLM
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, AllFields
from mpillm.options.fields.general import INTERACTIVE
from mpillm.options.fields.runtime_flags import BUILD_OPTIONS, RUNTIME_FLAGS, RUNTIME_OPTIONS
from mpillm.options.flags import LIMITS, check_values, environment_overlays, limits_of_engine, renamed
from mpillm.options.sources import OptionValue, Source
from mpillm.programs.servers.kinds import kind_of
from mpillm.workloads import WORKLOADS, accuracy_of, interactive_form, plain_form

Values = Mapping[str, OptionValue]
"""Every option's value, by name."""
Changes = Callable[[Values], dict[str, OptionValue]]
"""Function from all values to the changed values, by option.

Raises ConfigError for values that exclude each other, or that an option cannot have here.
"""

_CHECKPOINT = AllFields.trtllm_checkpoint_flags.name
_BUILD = AllFields.trtllm_build_flags.name
_RUNTIME = AllFields.trtllm_runtime_flags.name

_NVIDIA, _TENSORRT_LLM, _MPILLM = "NVIDIA's harness", "TensorRT-LLM", "mpillm"

# By --precision: qformat of TensorRT-LLM's quantization, and --quantization of mpillm's own cores.
_PRECISIONS = {
    "fp4": ("nvfp4", None),
    "nvfp4": ("nvfp4", None),
    "fp8": ("fp8", "fp8"),
    **dict.fromkeys(("fp16", "bf16", "fp32"), ("full_prec", "none")),
}


class Rule(NamedTuple):
    """A rule by which values of options follow from others."""

    name: str
    origin: str  # who defines it: NVIDIA's harness, TensorRT-LLM, or mpillm
    changes: Changes


def rule(name: str, origin: str) -> Callable[[Changes], Rule]:
    """Decorate a function that gets all values and returns the changed values."""
    return lambda changes: Rule(name, origin, changes)


def _implies(field: Field, value: object, other: Field, its_value: str, origin: str) -> Rule:
    """Return the rule that a value of one option implies the value of another option."""
    name = f"{field.name} {field.text(value)} means {other.name} {its_value}"
    return Rule(name, origin, lambda values: _implied(values, field.name, value, other.name, its_value))


def _implied(values: Values, name: str, value: object, other: str, its_value: str) -> dict[str, OptionValue]:
    """Return the implied value. Raise ConfigError if the user set the other option to a different value."""
    cause, effect = values[name], values[other]
    if cause.value != value or effect.value == its_value:
        return {}
    if effect.source >= Source.FILE:
        raise ConfigError(
            f"{name} {value} ({cause.where}) means {other} {its_value},"
            f" but that is {effect.value} ({effect.where})"
        )
    return {other: cause.implied(name, its_value)}


# --- the test and the core ---


@rule("a benchmark's name sets an accuracy target or a form, Interactive a form", _NVIDIA)
def named_test(values: Values) -> dict[str, OptionValue]:
    """Return workload, scenario and accuracy target that names such as llama2-70b-99.9 or Interactive mean.

    Lists, which are several tests, do not change. Raises ConfigError for an accuracy target that contradicts
    the name, and for a workload without an interactive form.
    """
    benchmarks, scenarios = values["benchmarks"], values["scenarios"]
    accuracy_target = values["accuracy_target"]
    names = [accuracy_of(name) for name in benchmarks.value or ()]
    if len(names) == 1 and (target := names[0][1]) is not None:
        name = f"benchmarks {benchmarks.value[0]}"
        if accuracy_target.source >= Source.FILE and accuracy_target.value != target:
            raise ConfigError(
                f"{name} ({benchmarks.where}) means accuracy_target {target}, "
                f"but that is {accuracy_target.value} ({accuracy_target.where})"
            )
        accuracy_target = benchmarks.implied(name, target)
    workload_names = tuple(name for name, _ in names) or None
    if scenarios.value == (INTERACTIVE,) and len(names) <= 1:
        name = f"scenarios {INTERACTIVE}"
        forms = {plain: interactive_form(plain) for plain in WORKLOADS if plain_form(plain) == plain}
        if workload_names is None:
            have = ", ".join(plain for plain, form in forms.items() if form)
            raise ConfigError(
                f"{name} ({scenarios.where}) is a form of a workload: name one with --benchmarks ({have})"
            )
        if (form := interactive_form(workload_names[0])) is None:
            have = " and ".join(WORKLOADS[workload_names[0]].scenarios)
            raise ConfigError(
                f"{name} ({scenarios.where}): {workload_names[0]} has no interactive form; it has {have}"
            )
        workload_names = (form,)
        scenarios = scenarios.implied(name, ("Server",))
    return {
        "benchmarks": benchmarks._replace(value=workload_names),
        "scenarios": scenarios,
        "accuracy_target": accuracy_target,
    }


environment_flags = Rule("the environment's flags come over a command's", _NVIDIA, environment_overlays)


@rule("server means the core that is its client", _MPILLM)
def core_of_the_server(values: Values) -> dict[str, OptionValue]:
    server = values["server"].value
    if not server:
        return {}
    kind = kind_of(server)
    # trtllm_disagg is the client of a leader, which the run's own servers do not have.
    if kind.disagg_protocol and values["core_type"].value == "trtllm_disagg":
        implied = _implied(values, "core_type", "trtllm_disagg", "mode", "disaggregated")
        return {**implied, "core_type": values["server"].implied("server", kind.core_type)}
    return _implied(values, "server", server, "core_type", kind.core_type)


use_triton = _implies(AllFields.use_triton, True, AllFields.harness_type, "triton", _NVIDIA)
core_of_triton = _implies(AllFields.harness_type, "triton", AllFields.core_type, "triton_grpc", _NVIDIA)
mode_of_the_core = _implies(AllFields.core_type, "trtllm_disagg", AllFields.mode, "disaggregated", _MPILLM)


@rule("trtllm_server_urls mean the core that is their client", _MPILLM)
def client_of_urls(values: Values) -> dict[str, OptionValue]:
    urls, core = values["trtllm_server_urls"], values["core_type"]
    if not urls.value or core.source >= Source.FILE:
        return {}
    return {"core_type": urls.implied("trtllm_server_urls", ENDPOINT_CORE)}


# --- flags and their options ---


@rule("other names of runtime flags mean the first", _TENSORRT_LLM)
def first_names(values: Values) -> dict[str, OptionValue]:
    flags = renamed(values[_RUNTIME], _RUNTIME)
    if (core_type := values["core_type"].value) not in TRTLLM:
        check_values(core_type, flags)
    return {_RUNTIME: flags}


@rule("precision is the checkpoint's qformat, and our cores' quantization", _NVIDIA)
def precision(values: Values) -> dict[str, OptionValue]:
    """Apply --precision to checkpoints and, unless a higher source sets quantization, to mpillm's cores."""
    precision_value, flags, changes = values["precision"], values[_CHECKPOINT], dict[str, OptionValue]()
    if precision_value.value is None:
        return changes
    qformat, algorithm = _PRECISIONS[precision_value.value]
    if _means(precision_value, f"qformat {qformat} among {_CHECKPOINT}", qformat, flags.key("qformat")):
        changes[_CHECKPOINT] = flags.with_key("qformat", precision_value.implied("precision", qformat))
    if values["core_type"].value in TRTLLM or algorithm is None:
        return changes  # `check_core` refuses a precision that the core does not support
    if _means(precision_value, f"quantization {algorithm}", algorithm, values["quantization"]):
        changes["quantization"] = precision_value.implied("precision", algorithm)
    return changes


def _means(precision_value: OptionValue, meaning: str, value: str, other: OptionValue) -> bool:
    """Return whether `other` is from a lower source than the precision, which then determines its value.

    Raises ConfigError if `other` has a different value from the same source.
    """
    if other.value not in (None, value) and other.source is precision_value.source:
        raise ConfigError(
            f"precision {precision_value.value} ({precision_value.where}) means {meaning}, but that is"
            f" {other.value} ({other.where})"
        )
    return other.source < precision_value.source


@rule("gpu_batch_size sets max_batch_size; a runtime flag and its option are one", _NVIDIA)
def runtime_flags(values: Values) -> dict[str, OptionValue]:
    size = _batch_size(values)
    others = {} if size is None else {"max_batch_size": size.implied("gpu_batch_size", size.value)}
    return _shared(values, _RUNTIME, RUNTIME_FLAGS, others)


def _shared(
    values: Values,
    flags_name: str,
    keys: Mapping[str, Field],
    others: Mapping[str, OptionValue] = MappingProxyType({}),
    only_options: bool = False,
) -> dict[str, OptionValue]:
    """Give one value to each option in `keys` and to the key of flags that is its other name.

    `others`: additional values of options. With `only_options`, the keys are removed from the flags; a key
    and an option with different values from one source are then an error.
    """
    flags, changes = values[flags_name], dict[str, OptionValue]()
    for key, field in keys.items():
        option, flag, alias = values.get(field.name, OptionValue(field.default)), flags.key(key), None
        if flag.value is not None:
            where = f"{flag.where}: {flags_name} {key}"
            flag = flag._replace(value=field.check(flag.value, where))
            alias = flag.implied(flags_name, flag.value)
            if only_options and flag.source is option.source and flag.value != option.value:
                raise ConfigError(
                    f"{where} is {flag.value}, but {field.name} is {option.value} ({option.where})"
                )
        candidates = (option, alias, others.get(field.name))
        # If sources are equal, `max` returns the first candidate.
        best = max(filter(None, candidates), key=lambda candidate: candidate.source)
        if field.name in values:
            changes[field.name] = best
        if only_options:
            flags = flags.without_key(key)
        elif best.value is not None:
            flags = flags.with_key(key, flag if best is alias else best)
    return {**changes, flags_name: flags}


def _batch_size(values: Values) -> OptionValue | None:
    """Return gpu_batch_size for this workload, if it has one."""
    sizes = values["gpu_batch_size"]
    if not isinstance(sizes.value, dict):
        return None if sizes.value is None else sizes
    workloads: tuple[str, ...] = values["benchmarks"].value or ()
    if len(workloads) != 1:
        return None
    size = sizes.value.get(workloads[0], sizes.value.get(plain_form(workloads[0])))
    return None if size is None else sizes._replace(value=size, keys={})


@rule("an engine is built for gpu_batch_size", _NVIDIA)
def engine_batch(values: Values) -> dict[str, OptionValue]:
    """Build an engine for gpu_batch_size, even if the runtime flags set a smaller batch."""
    size, run, flags = _batch_size(values), values["max_batch_size"], values[_BUILD]
    if size is None or run.value is None or "max_batch_size" in flags.value:
        return {}
    if size.value > run.value and size.source >= run.source:
        return {_BUILD: flags.with_key("max_batch_size", size.implied("gpu_batch_size", size.value))}
    return {}


@rule("runtime flags may set numbers of servers and their sizes", _NVIDIA)
def runtime_options(values: Values) -> dict[str, OptionValue]:
    return _shared(values, _RUNTIME, RUNTIME_OPTIONS, only_options=True)


@rule("build flags may set the layout", _NVIDIA)
def build_options(values: Values) -> dict[str, OptionValue]:
    return _shared(values, _BUILD, BUILD_OPTIONS, only_options=True)


@rule("a limit that is not set is the engine's", _MPILLM)
def limits_of_the_engine(values: Values) -> dict[str, OptionValue]:
    run_limits = {name: values[name].value for name in LIMITS}
    flags, changes = values[_RUNTIME], dict[str, OptionValue]()
    for name, built in limits_of_engine(run_limits, values[_BUILD].value).items():
        where = f"{values[_BUILD].key(name).where}: {_BUILD}"
        value = BY_NAME[name].check(built, f"{where} {name}")
        changes[name] = limit = OptionValue(value, Source.DEFAULT, where)
        changes[_RUNTIME] = flags = flags.with_key(name, limit)
    return changes


@rule("use_inflight_batching false is the policy static", _MPILLM)
def policy_static(values: Values) -> dict[str, OptionValue]:
    policy, flags = values["batch_scheduler_policy"], values[_RUNTIME]
    if (
        values["core_type"].value in TRTLLM
        or flags.value["use_inflight_batching"]
        or policy.value == "static"
    ):
        return {}
    batching = flags.key("use_inflight_batching")
    if policy.source >= Source.FILE:
        raise ConfigError(
            f"{batching.where}: {_RUNTIME} use_inflight_batching false excludes batch_scheduler_policy"
            f" {policy.value} ({policy.where})"
        )
    return {
        "batch_scheduler_policy": batching.implied("use_inflight_batching", "static"),
        _RUNTIME: flags.with_key("batch_scheduler_policy", batching._replace(value="static")),
    }


# --- deadlines ---


@rule("a test has at least twice its min_duration, unless a deadline is set", _MPILLM)
def time_for_the_test(values: Values) -> dict[str, OptionValue]:
    duration, deadline = values["min_duration"], values["test_deadline"]
    if duration.value is None or 2 * duration.value <= deadline.value or deadline.source >= Source.FILE:
        return {}
    return {"test_deadline": duration.implied("min_duration", 2 * duration.value)}


RULES = (
    named_test,
    environment_flags,
    core_of_the_server,
    use_triton,
    core_of_triton,
    mode_of_the_core,
    client_of_urls,
    first_names,
    precision,
    runtime_flags,
    engine_batch,
    runtime_options,
    build_options,
    limits_of_the_engine,
    policy_static,
    time_for_the_test,
)
"""Rules in the order in which they apply: a rule that changes a value precedes the rules that read it."""

Trace = list[tuple[Rule, str, OptionValue]]
"""Each change of a value: the rule, the option and its new value."""
