"""Options that are stated and have no effect on what runs here: one rule for all commands.

Each field declares who uses it (`Field.effect`, `fields.effects`). What nobody here uses is an error if what
is measured depends on it, and otherwise a line. It is a line, too, where a higher source chose what leaves
the value without effect (a file's `quantization` under `--core_type dummy` on the command line), in a
disaggregation YAML, which others read as well, and for a command that measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from disagg.errors import ConfigError, nearest
from mpillm.core_names import WITH_BACKENDS, with_backend
from mpillm.options.effect import ANY, Use
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, FIELDS, SIZES, AllFields
from mpillm.options.fields.effects import CLIENTS, DISAGG, PLAN, RUN, SERVE, STAGES
from mpillm.options.fields.runtime_flags import KNOWN_FLAGS, names_of
from mpillm.options.run_config import RunConfig
from mpillm.options.sources import OptionValue, Source
from mpillm.programs.servers.kinds import kind_of

_OF = {RUN: (RUN,), SERVE: (SERVE,), PLAN: (RUN, PLAN)}
"""Commands whose options choose what is measured, and whose they are. Others are stages before them."""

_OF_ENGINES = ("model", "checkpoint", "build")

SIZES_OF_HALVES = {
    "context": ("ctx_tp_size", "ctx_pp_size"),
    "generation": ("gen_tp_size", "gen_pp_size"),
    "": ("tensor_parallelism", "pipeline_parallelism"),
}
"""The options with the sizes of a server that the run starts, by its half of disaggregated serving."""

OF_CLIENTS = ("max_concurrency", "trtllm_backend", "triton_backend")
"""Runtime flags, beside options, that a client reads; the others are its server's."""

_MOST_NAMED = 24  # flags that a message lists


class Idle(NamedTuple):
    """A value that is stated in vain."""

    name: str  # of the option
    said: str  # with its value and, unless that is the command line, its source
    why: str
    is_error: bool


class _Why(NamedTuple):
    text: str
    of: str = ""  # the option that decided so, if one did
    is_other_command: bool = False


def check_idle(config: RunConfig, command: str) -> list[str]:
    """Return a line for each reason why something stated has no effect. Raises ConfigError if one may not."""
    return told(idle(config, command))


def told(found: Sequence[Idle]) -> list[str]:
    """As `check_idle`, of what was found."""
    if errors := [one for one in found if one.is_error]:
        raise ConfigError(
            "\n".join(f"{one.said} has no effect {one.why}" for one in errors),
            about=dict.fromkeys(one.name for one in errors),
        )
    reasons: dict[str, list[str]] = {}
    for one in found:
        reasons.setdefault(one.why, []).append(one.said)
    return [f"no effect {why}: {', '.join(said)}" for why, said in reasons.items()]


def idle(config: RunConfig, command: str) -> list[Idle]:
    """Return what is stated and has no effect in `command`, or, if that is a stage, in any command after it.

    The sections of a YAML are looked at one by one; what one of them uses has its effect.
    """
    found: list[Idle] = []
    sections: Sequence[RunConfig] = [*config.sections.values()] or [config]
    for field in FIELDS:
        stated: dict[tuple[Source, str], list[RunConfig]] = {}
        for section in sections:
            value = section.option_values[field.name]
            if _is_stated(field, value):
                stated.setdefault((value.source, value.where), []).append(section)
        for (source, _), where in stated.items():
            whys = [why_idle(field, section, command) for section in where]
            if (why := whys[0]) is not None and None not in whys:
                said = where[0].named(field.name)
                found += _judged(field.name, said, source, why, field.effect.measured, config, command)
    for flags in (
        AllFields.trtllm_checkpoint_flags,
        AllFields.trtllm_build_flags,
        AllFields.trtllm_runtime_flags,
    ):
        found += _idle_flags(config, flags, command)
    return found


def idle_in_all(configs: Sequence[RunConfig], command: str) -> list[Idle]:
    """Return what is stated for several tests and has an effect in none."""
    first, *others = (idle(config, command) for config in configs)
    names = [{one.name for one in each} for each in others]
    return [one for one in first if all(one.name in each for each in names)]


def _idle_flags(config: RunConfig, flags: Field, command: str) -> Iterator[Idle]:
    """Yield the keys of flags that have no effect; those that are options are looked at as options."""
    core = with_backend(config.core_type, config.trtllm_runtime_flags)
    known = names_of(flags, core)
    core_source = config.option_value("core_type").source
    for key, flag in config.option_values[flags.name].all_keys().items():
        field, value = KNOWN_FLAGS.get(key), flag.value
        # a file that names no core has TensorRT-LLM's flags for whatever core
        measured = flag.source is not Source.FILE or core_source is Source.FILE
        if flags is AllFields.trtllm_runtime_flags and field is not None:
            if field in FIELDS or not _is_stated(field, flag._replace(value=field.check(value, key))):
                continue
            why, measured = why_idle(field, config, command), measured and field.effect.measured
        elif not _is_stated(flags, flag):
            continue
        elif key in (known or ()) and core in CLIENTS and not config.server and key not in OF_CLIENTS:
            lacks = _lacking(Use(STAGES, (core,)), config, command)
            why = lacks[1] if lacks else None
        elif known is None or key in known:
            continue
        else:
            has = f"; it has {', '.join(known)}" if known and len(known) <= _MOST_NAMED else ""
            why = _Why(f"on the {core} core{nearest(key, known)}{has}", "core_type")
        if why is not None:
            said = f"{flag.where}: {flags.name} {key} {value}"
            yield from _judged(flags.name, said, flag.source, why, measured, config, command)


def why_idle(field: Field, config: RunConfig, command: str) -> _Why | None:
    """Return why a field has no effect; None if it has one.

    Of several uses, the one that lacks least is named.
    """
    if config.server and (field.effect is DISAGG or field in (AllFields.mode, AllFields.disagg_config)):
        return None  # `own_servers` refuses a kind without halves
    if config.server and of_engine(field):
        kind = kind_of(config.server)
        return None if kind.takes(field.name) else _Why(f"on a {kind.name} server", "server")
    if not field.effect.uses:
        return _Why(f"here ({field.effect.instead})" if field.effect.instead else "here")
    lacking = [_lacking(use, config, command) for use in field.effect.uses]
    if None in lacking:
        return None
    return max(filter(None, lacking), key=lambda one: one[0])[1]


def of_engine(field: Field) -> bool:
    """Return whether an option is about the engine: a server that the run starts takes or lacks it."""
    return (field.group in _OF_ENGINES and field.name != "model_path") or field.name in SIZES


def _lacking(use: Use, config: RunConfig, command: str) -> tuple[int, _Why] | None:
    """Return what a use lacks, and how near it is; None: nothing."""
    core = with_backend(config.core_type, config.trtllm_runtime_flags)
    lacks_core = bool(use.cores) and core in WITH_BACKENDS and core not in use.cores
    if use.commands and command in _OF and not set(_OF[command]).intersection(use.commands):
        of_servers = (
            "; servers that it does not start have settings of their own"
            if use.commands == STAGES and core in CLIENTS
            else ""
        )
        said = f"on {command} (it is for {' and '.join(use.commands)}{of_servers})"
        return 4 if use.cores and not lacks_core else 0, _Why(said, is_other_command=True)
    if lacks_core:
        return 1, _Why(f"on the {core} core", "core_type")
    if use.scenarios and not set(use.scenarios).intersection(config.scenarios):
        said = ", ".join(config.scenarios)
        return 2, _Why(f"in scenario {said} (it is for {' and '.join(use.scenarios)})", "scenarios")
    if use.needs is not None:
        name, value = use.needs
        if name not in BY_NAME:
            met = config.trtllm_build_flags.get(name) == value
            return (
                None if met else (3, _Why(f"without {name} among trtllm_build_flags", "trtllm_build_flags"))
            )
        there = getattr(config, name)
        if (not there) if value is ANY else there != value:
            wanted = "" if value is ANY else f" {BY_NAME[name].text(value)}"
            return 3, _Why(f"without --{name}{wanted}", name)
    return None


def _is_stated(field: Field, value: OptionValue) -> bool:
    return value.source >= Source.YAML and value.value not in (None, {}, field.default)


def _judged(
    name: str, said: str, source: Source, why: _Why, measured: bool, config: RunConfig, command: str
) -> Iterator[Idle]:
    core = with_backend(config.core_type, config.trtllm_runtime_flags)
    if why.is_other_command and (source is Source.FILE or (source is Source.YAML and core in CLIENTS)):
        return  # a file is for several commands; a YAML of servers is theirs
    is_chosen = source <= Source.FILE and config.option_value(why.of or name).source > source
    is_copied = source is Source.FILE and why.of == "scenarios"  # NVIDIA's harness passes over them
    is_error = measured and why.of != "" and command in _OF and source >= Source.FILE
    yield Idle(name, said, why.text, is_error and not is_chosen and not is_copied)
