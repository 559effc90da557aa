"""Options that are set and have no effect on a run: one rule for all commands.

Each field declares its uses (`Field.effect`, `fields.effects`). A value without a use in this run is an error
if the results depend on it; otherwise, the user gets a line. In these cases, it is always only a line:

- a higher source makes the value unused: `--core_type dummy`, for example, a file's `quantization`;
- the value is from a disaggregation YAML, which other programs also read;
- the command does not measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from disagg.errors import ConfigError, nearest
from mpillm.core_names import WITH_BACKENDS, with_backend
from mpillm.options.field import ANY, Field, Use
from mpillm.options.fields import BY_NAME, FIELDS, SIZES, AllFields
from mpillm.options.fields.effects import CLIENTS, DISAGG, FIND_MAX_QPS, PLAN, RUN, SERVE, STAGES
from mpillm.options.fields.runtime_flags import KNOWN_FLAGS, names_of
from mpillm.options.run_config import RunConfig
from mpillm.options.sources import OptionValue, Source
from mpillm.programs.load_clients.kinds import CONVERSATIONS
from mpillm.programs.servers.kinds import kind_of

_COMMANDS_OF = {
    RUN: (RUN,),
    SERVE: (SERVE,),
    PLAN: (RUN, PLAN),
    FIND_MAX_QPS: (RUN, FIND_MAX_QPS),
}
"""By command: the commands whose options it uses. Commands without an entry are stages before these."""

_OF_ENGINES = ("model", "checkpoint", "build")

SERVER_SIZES = {
    "context": ("ctx_tp_size", "ctx_pp_size"),
    "generation": ("gen_tp_size", "gen_pp_size"),
    "": ("tensor_parallelism", "pipeline_parallelism"),
}
"""The options with the sizes of a server that the run starts, by the server's role."""

CLIENT_FLAGS = ("max_concurrency", "trtllm_backend", "triton_backend")
"""Runtime flags, other than options, that a client reads. Its server reads all other flags."""

_OF_LEADER = (
    *(AllFields.server_role, AllFields.disagg_config, AllFields.api_key, AllFields.max_body_bytes),
    *(AllFields.load_deadline, AllFields.stall_timeout, AllFields.drain_deadline),
    *(AllFields.traffic_distribution_policy, AllFields.tokens_per_block),
)

_MAX_NAMED = 24  # flags that a message lists


class UnusedOption(NamedTuple):
    """A value that is set and has no effect."""

    name: str  # of the option
    text: str  # the option with its value and, unless it is the command line, its source
    cause: str
    is_error: bool


class _Cause(NamedTuple):
    text: str
    of: str = ""  # the option that makes the value unused, if any
    is_other_command: bool = False


def check_unused(config: RunConfig, command: str) -> list[str]:
    """Return a line for each cause of unused options. Raises ConfigError if an unused option is an error."""
    return unused_option_lines(unused_options(config, command))


def unused_option_lines(unused: Sequence[UnusedOption]) -> list[str]:
    """Do as `check_unused`, for options that were already collected."""
    if errors := [option for option in unused if option.is_error]:
        raise ConfigError(
            "\n".join(f"{option.text} has no effect {option.cause}" for option in errors),
            about=dict.fromkeys(option.name for option in errors),
        )
    reasons: dict[str, list[str]] = {}
    for option in unused:
        reasons.setdefault(option.cause, []).append(option.text)
    return [f"no effect {cause}: {', '.join(texts)}" for cause, texts in reasons.items()]


def unused_options(config: RunConfig, command: str) -> list[UnusedOption]:
    """Return the options without effect in `command` or, if that is a stage, in any command after it.

    The sections of a YAML are examined separately: a value has an effect if one section uses it.
    """
    unused: list[UnusedOption] = []
    sections: Sequence[RunConfig] = [*config.sections.values()] or [config]
    for field in FIELDS:
        set_in: dict[tuple[Source, str], list[RunConfig]] = {}
        for section in sections:
            value = section.option_values[field.name]
            if _is_set(field, value):
                set_in.setdefault((value.source, value.where), []).append(section)
        for (source, _), users in set_in.items():
            causes = [_unused_cause(field, section, command) for section in users]
            if (cause := causes[0]) is not None and None not in causes:
                text = users[0].named(field.name)
                unused += _checked(field.name, text, source, cause, field.effect.measured, config, command)
    for flags in (
        AllFields.trtllm_checkpoint_flags,
        AllFields.trtllm_build_flags,
        AllFields.trtllm_runtime_flags,
    ):
        unused += _unused_flags(config, flags, command)
    return unused


def unused_in_role(config: RunConfig) -> list[str]:
    """Return a line with the options that `serve` does not use with `config.server_role`, if one is set.

    The YAML has the addresses of the leader and the workers, and the leader computes nothing. Only the
    command line counts: files and environment variables are for several commands.
    """
    unused: dict[str | None, list[Field]] = {
        "leader": [field for field in FIELDS if field not in _OF_LEADER],
        "worker": [AllFields.host, AllFields.port],
    }
    values = [(field, config.option_value(field.name)) for field in unused.get(config.server_role, [])]
    texts = [
        config.named(field.name)
        for field, value in values
        if value.source is Source.COMMAND_LINE and _is_set(field, value)
    ]
    return [f"no effect with --server_role {config.server_role}: {', '.join(texts)}"] if texts else []


def unused_in_all(configs: Sequence[RunConfig], command: str) -> list[UnusedOption]:
    """Return the options of several tests that have no effect in any of the tests."""
    first, *others = (unused_options(config, command) for config in configs)
    names = [{option.name for option in names} for names in others]
    return [option for option in first if all(option.name in names for names in names)]


def _unused_flags(config: RunConfig, flags: Field, command: str) -> Iterator[UnusedOption]:
    """Yield the keys of flags without effect, except keys that are options: `unused_options` checks these."""
    core = with_backend(config.core_type, config.trtllm_runtime_flags)
    known = names_of(flags, core)
    core_source = config.option_value("core_type").source
    for key, flag in config.option_values[flags.name].all_keys().items():
        field, value = KNOWN_FLAGS.get(key), flag.value
        # A file that does not set the core has TensorRT-LLM's flags for any core.
        measured = flag.source is not Source.FILE or core_source is Source.FILE
        if flags is AllFields.trtllm_runtime_flags and field is not None:
            if field in FIELDS or not _is_set(field, flag._replace(value=field.check(value, key))):
                continue
            cause, measured = _unused_cause(field, config, command), measured and field.effect.measured
        elif not _is_set(flags, flag):
            continue
        elif key in (known or ()) and core in CLIENTS and not config.server and key not in CLIENT_FLAGS:
            missing = _lacking(Use(STAGES, (core,)), config, command)
            cause = missing[1] if missing else None
        elif known is None or key in known:
            continue
        else:
            has = f"; it has {', '.join(known)}" if known and len(known) <= _MAX_NAMED else ""
            cause = _Cause(f"on the {core} core{nearest(key, known)}{has}", "core_type")
        if cause is not None:
            text = f"{flag.where}: {flags.name} {key} {value}"
            yield from _checked(flags.name, text, flag.source, cause, measured, config, command)


def _unused_cause(field: Field, config: RunConfig, command: str) -> _Cause | None:
    """Return why a field has no effect; None if it has one.

    With several uses, the cause is that of the use that comes closest to being met.
    """
    if config.server and (field.effect is DISAGG or field in (AllFields.mode, AllFields.disagg_config)):
        return None  # `own_servers` rejects a kind of server without context and generation servers
    if config.server and of_engine(field):
        kind = kind_of(config.server)
        return None if kind.takes(field.name) else _Cause(f"on a {kind.name} server", "server")
    if not field.effect.uses:
        return _Cause(f"here ({field.effect.instead})" if field.effect.instead else "here")
    lacking = [_lacking(use, config, command) for use in field.effect.uses]
    if None in lacking:
        return None
    return max(filter(None, lacking), key=lambda one: one[0])[1]


def of_engine(field: Field) -> bool:
    """Return whether an option is about the engine. A server that the run starts may not support it."""
    return (field.group in _OF_ENGINES and field.name != "model_path") or field.name in SIZES


def _lacking(use: Use, config: RunConfig, command: str) -> tuple[int, _Cause] | None:
    """Return how close a use is to being met, and what is missing; None if the use is met."""
    core = with_backend(config.core_type, config.trtllm_runtime_flags)
    lacks_core = bool(use.cores) and core in WITH_BACKENDS and core not in use.cores
    if use.commands and command in _COMMANDS_OF and not set(_COMMANDS_OF[command]).intersection(use.commands):
        is_servers = use.commands == STAGES and core in CLIENTS
        of_servers = "; servers that it does not start have their own settings" if is_servers else ""
        text = f"on {command} (it is for {' and '.join(use.commands)}{of_servers})"
        return 4 if use.cores and not lacks_core else 0, _Cause(text, is_other_command=True)
    if lacks_core:
        return 1, _Cause(f"on the {core} core", "core_type")
    if use.scenarios and not set(use.scenarios).intersection(config.scenarios):
        text = ", ".join(config.scenarios)
        return 2, _Cause(f"in scenario {text} (it is for {' and '.join(use.scenarios)})", "scenarios")
    if use.loads and config.load not in use.loads:
        # As close as a scenario: of two uses that lack one of these, the first one is the cause.
        return 2, _Cause(_wrong_load(use.loads, config), "harness")
    if use.needs is not None:
        name, value = use.needs
        if name not in BY_NAME:
            if config.trtllm_build_flags.get(name) == value:
                return None
            return 3, _Cause(f"without {name} among trtllm_build_flags", "trtllm_build_flags")
        set_value = getattr(config, name)
        if (not set_value) if value is ANY else set_value != value:
            value_text = "" if value is ANY else f" {BY_NAME[name].text(value)}"
            return 2, _Cause(f"without --{name}{value_text}", name)
    return None


def _wrong_load(loads: tuple[str, ...], config: RunConfig) -> str:
    if loads == (CONVERSATIONS,):
        return f"without --harness {CONVERSATIONS}"
    if not config.harness:
        return "without --harness"
    return f"with --harness {config.harness.partition(':')[0]} (it is for {' and '.join(loads)})"


def _is_set(field: Field, value: OptionValue) -> bool:
    return value.source >= Source.YAML and value.value not in (None, {}, field.default)


def _checked(
    name: str, text: str, source: Source, cause: _Cause, measured: bool, config: RunConfig, command: str
) -> Iterator[UnusedOption]:
    core = with_backend(config.core_type, config.trtllm_runtime_flags)
    if cause.is_other_command and (source is Source.FILE or (source is Source.YAML and core in CLIENTS)):
        return  # a file is for several commands, and a YAML of servers is for the servers
    is_chosen = source <= Source.FILE and config.option_value(cause.of or name).source > source
    is_copied = source is Source.FILE and cause.of == "scenarios"  # NVIDIA's harness ignores these values
    is_error = measured and cause.of != "" and command in _COMMANDS_OF and source >= Source.FILE
    yield UnusedOption(name, text, cause.text, is_error and not is_chosen and not is_copied)
