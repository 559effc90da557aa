"""The options of a command: found, each with where it came from, and identical on every rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from disagg.errors import ConfigError
from mpillm import config_file, fields, workloads
from mpillm.command_line import Parser, add_fields
from mpillm.configurator import DEFAULT, Configuration, Field, Found, Level, Origin
from mpillm.fields import BY_NAME, FIELDS
from mpillm.flags import unify
from mpillm.model_files import GenerationConfig

T = TypeVar("T")

# What `run` shows in --help.
RUN_FIELDS = fields.shown("workload", "topology", "model", "harness", "triton", "data", "generation", "test", "output", "deadlines")


class RunConfig:
    """Values by field name, as attributes, and the source of each."""

    def __init__(self, found: Mapping[str, Found]) -> None:
        self.found = dict(found)
        self._built: dict[type, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._found(name).value
        except KeyError:
            raise AttributeError(name) from None

    def _found(self, name: str) -> Found:
        """By the field's name, or one of its other names."""
        found: dict[str, Found] = self.__dict__.get("found", {})
        return found.get(name) or found[BY_NAME[name].name]  # a bench's own field may have another's other name

    @property
    def values(self) -> dict[str, Any]:
        """The values alone, by name."""
        return {name: found.value for name, found in self.found.items()}

    @property
    def scenario(self) -> str:
        """LoadGen's scenario, of a command that has just one."""
        (scenario,) = self.scenarios
        return str(scenario)

    @property
    def benchmark(self) -> str | None:
        """The workload's name, of a command that has at most one."""
        return self.benchmarks[0] if self.benchmarks else None

    def origin(self, name: str) -> Origin:
        """Where the value came from."""
        return self._found(name).origin

    @property
    def workload(self) -> workloads.Workload | None:
        """The workload, scaled as this command wants it."""
        return workloads.get(self.benchmark, self.model_scale) if self.benchmark else None

    def source(self, name: str) -> str:
        """Where the value came from: ``command line``, ``environment variable X``, ``file:line``, ``workload X`` or ``default``."""
        return self.origin(name).where

    def given(self, name: str) -> bool:
        """Whether a person set it."""
        return self.origin(name).level >= Level.CONTEXT

    def named(self, name: str) -> str:
        """The option with its value and, where that is not the command line, its source: for messages."""
        field = BY_NAME[name]
        value = field.text(getattr(self, name))
        level, where = self.origin(name)
        return f"--{name} {value}" if level is Level.COMMAND_LINE else f"{name} {value} ({where})"

    def with_sources(self, message: str) -> str:
        """`message`, and where the options that it names (``--name``, ``name value``, or a path) were set if no command line did."""
        places = []
        for name, (value, (level, where), _) in self.found.items():
            if level in (Level.DEFAULT, Level.COMMAND_LINE) or where in message or name not in BY_NAME or not value:
                continue
            field = BY_NAME[name]
            text = re.escape(field.text(value))
            mentions = [f"--({'|'.join((field.name, *field.aliases))})\\b", rf"\b{name} {text}(?!\w)"]
            if field.from_string is None and not field.choices and re.search("[./]", value):  # a word alone may mean anything
                mentions.append(rf"(?<![\w./-]){text}(?![\w.-])")
            if any(re.search(mention, message) for mention in mentions):
                places.append(f"\n{name} is set by {where}")
        return message + "".join(places)

    def configuration(self) -> Configuration:
        """The values for `@autoconfigure`d classes, as they are: nothing is laid over them again."""
        values = {BY_NAME[name]: found.value for name, found in self.found.items() if found.value is not None and name in BY_NAME}
        return Configuration(values, options={}, environ={})

    @contextlib.contextmanager
    def autoapply(self) -> Iterator[None]:
        """`configuration` is in force until the block ends, and a ConfigError there says where what it names was set."""
        try:
            with self.configuration().autoapply():
                yield
        except ConfigError as error:
            raise type(error)(self.with_sources(str(error))) from error

    def build(self, cls: type[T]) -> T:
        """The instance of an `@autoconfigure`d class that these values make; the same one each time."""
        if cls in self._built:
            return cast(T, self._built[cls])
        with self.autoapply():
            built = self._built[cls] = cls()
        return built

    def digest(self) -> str:
        """A hash of all values and of the YAML that they name: the same on ranks that were started alike. Only rank 0 reads others."""
        state = hashlib.sha256(json.dumps(self.values, sort_keys=True, default=str).encode())
        if self.disagg_config and Path(self.disagg_config).is_file():
            state.update(Path(self.disagg_config).read_bytes())
        return state.hexdigest()

    def difference(self, other: Mapping[str, Any]) -> str:
        """The first option whose value differs here from `other`'s, with both values; empty if none does."""
        for name, value in self.values.items():
            if value != other.get(name):
                return f"--{name} is {other.get(name)!r} there and {value!r} here"
        return ""

    def to_json(self) -> dict[str, Any]:
        """``{name: {"value", "source"}}``; for a dictionary made of several, "source" is each key's."""
        return {name: {"value": found.value, "source": _source(found)} for name, found in self.found.items()}


def _source(found: Found) -> str | dict[str, str]:
    return {key: origin.where for key, origin in found.keys.items()} if found.keys else found.origin.where


def options_page() -> str:
    """docs/options.md: every option, from the fields."""
    lines = [
        "# Options",
        "",
        "Made by `make docs` from `mpillm/fields/`. Underscores and hyphens mean the same: `--log_dir`, `--log-dir`; upper and lower case",
        "are alike in words to choose from. The commands of one test take the same options: each uses those of its stages.",
    ]
    group = ""
    for field in FIELDS:
        if field.group != group:
            group = field.group
            lines += ["", f"## {group.capitalize()}", "", "| option | meaning | default |", "|---|---|---|"]
        also = "".join(f", `--{alias}`" for alias in field.aliases)
        meaning = (field.description + (f" ({', '.join(field.choices)})" if field.choices else "")).replace("|", "&#124;")
        default = f"`{field.shown_default}`" if field.shown_default else ""
        lines.append(f"| `--{field.name}`{also} | {meaning} | {default} |")
    return "\n".join(lines) + "\n"


def collect(argv: Sequence[str], own: Sequence[Field], parser: Parser) -> RunConfig:
    """Values of a command's `own` fields, from the command line and nothing else; ConfigError naming option, value and what is allowed."""
    add_fields(parser, own)
    return RunConfig(_complete(Configuration(options=parser.texts(argv), environ={}), own))


def parse(argv: Sequence[str], parser: Parser, shown: Sequence[Field], defaults: Mapping[Field, Any] | None = None) -> RunConfig:
    """Values of all fields: from the command line, the environment, a user's file and the workload; ConfigError names the source.

    `shown` are in --help, and may be a command's own. The other fields are taken as well: the commands of one test share their options.
    `defaults` of this command go before those of the fields.
    """
    known = _with_all(shown)
    add_fields(parser, known, shown)
    return _resolve(parser.texts(argv), known, defaults)


def parse_each(argv: Sequence[str], parser: Parser, shown: Sequence[Field], defaults: Mapping[Field, Any] | None = None) -> list[RunConfig]:
    """As `parse`, for every pair of a workload and a scenario: comma lists of them are several tests."""
    known = _with_all(shown)
    add_fields(parser, known, shown)
    options = parser.texts(argv)
    named = [{"benchmarks": benchmark} for benchmark in _resolve(options, known, defaults).benchmarks or ()]
    return [
        _resolve(options | benchmark | {"scenarios": scenario}, known, defaults)
        for benchmark in named or [{}]
        for scenario in _resolve(options | benchmark, known, defaults).scenarios
    ]


def _with_all(shown: Sequence[Field]) -> list[Field]:
    return list({field.name: field for field in (*FIELDS, *shown)}.values())


def _resolve(options: Mapping[str, str], known: Sequence[Field], defaults: Mapping[Field, Any] | None = None) -> RunConfig:
    """A person's file lies over the model's generation config, that over the workload's values, and those over a command's defaults."""
    workload = Configuration(below=Configuration(defaults, origins=Origin(Level.DEFAULT, "default of this command")))
    generation = Configuration(below=workload)
    own = Configuration(below=generation, options=options)

    def said(field: Field) -> Found:
        return own.resolve([field]).get(field, Found(None, DEFAULT))

    if (path := said(fields.config_file).value) is not None:
        given = {key: said(key).value for key in config_file.KEYS if said(key).origin.level > Level.CONTEXT}
        if said(fields.use_triton).value:
            given.setdefault(fields.harness_type, "triton")
        file = config_file.load(path, given)
        own.update(file)
        own.origins = file.origins
    benchmarks, scenarios = said(fields.benchmarks).value, said(fields.scenarios).value
    if benchmarks is not None and len(benchmarks) == 1:
        known_workload = workloads.get(benchmarks[0], said(fields.model_scale).value)
        if scenarios[0] not in known_workload.scenarios and said(fields.scenarios).origin.level < Level.WORKLOAD:
            scenarios = known_workload.scenarios[:1]  # of a benchmark that has none but Server
            workload.update({fields.scenarios: scenarios})
        workload.update(known_workload.defaults(scenarios[0]))
        workload.origins = Origin(Level.WORKLOAD, f"workload {known_workload.title}")
    path, origin, _ = said(fields.llm_gen_config_path)
    if path is not None:
        try:
            generation.update(GenerationConfig.from_file(path).values(path))
        except ConfigError as error:
            raise ConfigError(f"{error} (--llm_gen_config_path, {origin.where})") from None
        generation.origins = Origin(Level.CONTEXT, path)
    found = _complete(own, known)
    _imply(found)
    unify(found)
    return RunConfig(found)


def _complete(configuration: Configuration, known: Sequence[Field]) -> dict[str, Found]:
    found = configuration.resolve(known)
    return {field.name: found.get(field, Found(None, DEFAULT)) for field in known}


def _imply(found: dict[str, Found]) -> None:
    """Options that say another one's value; ConfigError if that says something else."""
    for name, value, implied, its_value in (
        ("use_triton", True, "harness_type", "triton"),
        ("harness_type", "triton", "core_type", "triton_grpc"),
        ("core_type", "trtllm_disagg", "mode", "disaggregated"),
    ):
        cause, effect = found[name], found[implied]
        if cause.value != value or effect.value == its_value:
            continue
        if effect.origin.level >= Level.CONTEXT:
            raise ConfigError(
                f"{name} {value} ({cause.origin.where}) means {implied} {its_value}, but that is {effect.value} ({effect.origin.where})"
            )
        found[implied] = Found(its_value, Origin(cause.origin.level, f"{cause.origin.where}: {name}"))


def parse_run(argv: Sequence[str]) -> RunConfig:
    """The configuration that a command line of `run` gives."""
    parser = Parser(
        prog="mpillm run",
        description="Run an MLPerf Inference LLM test on the ranks of this mpirun.",
        epilog="examples:\n"
        "  mpirun -n 5 python -m mpillm run --mode disaggregated --model_path DIR --save_outputs\n"
        "  mpirun -n 3 python -m mpillm run --core_type dummy --scenarios Server --server_target_qps 100 --min_duration 10",
    )
    config = parse(argv, parser, RUN_FIELDS)
    _check_together(config)
    _check_compliance(config)
    return config


def _check_together(config: RunConfig) -> None:
    for name in ("scenarios", "benchmarks"):
        if len(getattr(config, name) or ()) > 1:
            raise ConfigError(f"{config.named(name)}: a run is one test of one workload; start it once for each")
    if config.dry_run:
        raise ConfigError(f"{config.named('dry_run')}: `python -m mpillm plan` shows what a run would do, without MPI")
    if config.min_output_len > config.max_output_len:
        raise ConfigError(f"{config.named('min_output_len')} is more than {config.named('max_output_len')}")
    if config.core_type == "torch" and not config.model_path:
        raise ConfigError(
            "--core_type torch needs --model_path: a Hugging Face folder, or the preset tiny-llama"
            " (python -m mpillm fetch-model smollm2-135m brings a small real model)"
        )
    if config.dataset == "synthetic" and config.given("dataset_path"):
        raise ConfigError(f"{config.named('dataset')} and {config.named('dataset_path')} exclude each other")
    without_effect: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("--enable_chunked_context true", config.enable_chunked_context or config.disagg_config, ("context_chunking_policy",)),
        ("--dataset synthetic", config.dataset == "synthetic", ("num_samples", "input_mean", "input_stdev", "output_mean", "output_stdev")),
        ("--benchmarks", config.benchmarks, ("model_scale",)),
    )
    for needed, is_there, needing in without_effect:
        for name in needing:
            if not is_there and config.given(name) and getattr(config, name) != BY_NAME[name].default:
                raise ConfigError(f"{config.named(name)} has no effect without {needed}")
    conflicting = (
        ("aggregated", ("num_ctx_servers", "ctx_tp_size", "ctx_pp_size", "num_gen_servers", "gen_tp_size", "gen_pp_size")),
        ("disaggregated", ("tensor_parallelism", "pipeline_parallelism")),
    )
    for mode, names in conflicting:
        for name in names:
            if config.mode == mode and config.given(name) and not config.disagg_config:
                raise ConfigError(f"{config.named(name)} has no meaning with --mode {mode}")


def _check_compliance(config: RunConfig) -> None:
    if config.compliance_test and config.audit_conf:
        raise ConfigError(
            f"{config.named('compliance_test')} and {config.named('audit_conf')} exclude each other: the test has an audit.config"
        )
    if config.compliance_test and config.test_mode != "PerformanceOnly":
        raise ConfigError(f"{config.named('compliance_test')} is a performance run, not {config.named('test_mode')}")
    if config.audit_conf and not Path(config.audit_conf).is_file():
        raise ConfigError(f"{config.named('audit_conf')}: no such file")


def run_name(config: RunConfig) -> str:
    """``<workload or model>-<scenario>``, for the run directory's name."""
    model = config.benchmark or (Path(config.model_path).name if config.model_path else config.core_type)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"{model}-{config.scenario}")
