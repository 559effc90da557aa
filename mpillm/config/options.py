"""The options of a command: values, their sources, and what must agree. They are identical on every rank.

`fields` declares them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import disagg
from disagg import DisaggConfig
from disagg.errors import ConfigError
from mpillm import fields, workloads
from mpillm.config import disagg_values, layers
from mpillm.config.part import Part
from mpillm.config.resolution import resolve
from mpillm.config.values import Values
from mpillm.configurator import Configuration, Field
from mpillm.configurator.command_line import Parser, add_fields
from mpillm.configurator.found import COMMAND_LINE, Found, Level
from mpillm.configurator.parsers import Secret
from mpillm.fields import BY_NAME, FIELDS, AllFields
from mpillm.fields.passed_over import PASSED_OVER

T = TypeVar("T")

# What `run` shows in --help.
RUN_FIELDS = fields.shown(
    *("workload", "topology", "model", "build", "harness", "triton"),
    *("data", "generation", "test", "output", "deadlines"),
    also=("server_port", "worker_start_port"),  # of the YAML that it leaves
)


# What `serve` shows.
SERVE_FIELDS = fields.shown(
    *("serve", "workload", "topology", "model", "build", "harness", "generation", "deadlines"),
    also=("apply_chat_template", "log_dir"),
)


class RunConfig(Values, AllFields):
    """The values of all fields, and the source of each."""

    def __init__(self, found: Mapping[str, Found], stated: Mapping[str, Found] | None = None) -> None:
        """`stated`: what `found` was resolved from, if a YAML may come to it."""
        super().__init__(found)
        self.stated = dict(stated or found)
        self.yaml: DisaggConfig | None = None
        self.sections: Mapping[str, RunConfig] = {}
        self.half = ""  # of disaggregated serving, if the run is one: context or generation
        self.part: Part | None = None
        self._built: dict[type, Any] = {}

    @property
    def scenario(self) -> str:
        """LoadGen's scenario, of a command that has just one."""
        (scenario,) = self.scenarios
        return str(scenario)

    @property
    def benchmark(self) -> str | None:
        """The workload's name, of a command that has at most one."""
        return self.benchmarks[0] if self.benchmarks else None

    @property
    def benchmark_name(self) -> str | None:
        """The workload's name, with the accuracy target if the user set one: llama2-70b-99.9."""
        target = f"-{100 * self.accuracy_target:g}" if self.given("accuracy_target") else ""
        return self.benchmark and self.benchmark + target

    @property
    def workload(self) -> workloads.Workload | None:
        """The workload, scaled as this command wants it."""
        return workloads.get(self.benchmark, self.model_scale) if self.benchmark else None

    def with_yaml(self) -> RunConfig:
        """Return the configuration with the values of the disaggregation YAML that it names, if any.

        `yaml` is then its content, and `of` has the values of each section, which may differ. ConfigError:
        names the file, or a value that the user set otherwise in a higher source. A dry run ignores a missing
        file.
        """
        path = self.disagg_config
        if not path or (self.dry_run and not Path(path).exists()):
            return self
        try:
            yaml = disagg.load(path)
            whole = self._over(disagg_values.of_the_run(yaml, path, self.core_type == "trtllm_disagg"))
            sections = {
                name: whole._over(disagg_values.of_a_section(name, server, path))
                for name, server in yaml.sections
            }
        except ConfigError as error:
            raise type(error)(self.explain(error) + self.set_by("disagg_config")) from None
        made = RunConfig(whole.found)
        made.yaml, made.sections = yaml, sections
        for name in made.found:  # what all sections have alike is the run's
            first, *others = (section.found[name] for section in sections.values())
            if all(other.value == first.value for other in others):
                made.found[name] = max(first, *others, key=lambda one: one.origin.level) if others else first
        return made

    def _over(self, yaml: Mapping[str, disagg_values.Stated]) -> RunConfig:
        """Lay a YAML's values under those of higher sources, which must be the same."""
        return _resolved(layers.lay_yaml(self.stated, self.found, yaml, self.named))

    def of(self, section: str) -> RunConfig:
        """Return the values that hold for the instances of a YAML's section."""
        return self.sections.get(section, self)

    def passed_over(self) -> str:
        """Name the settings of a file in NVIDIA's form that have no effect here; "" if there are none."""
        said = [f"{name} {self.found[name].value}" for name in PASSED_OVER if name in self.found]
        return f"{self.config_file}: without effect here: {', '.join(said)}" if said else ""

    def named(self, name: str) -> str:
        """Return, for messages, the option with its value and, unless that is from the command line, its
        source."""
        field = BY_NAME[name]
        value = field.text(getattr(self, name))
        origin = self.origin(name)
        return f"--{name} {value}" if origin == COMMAND_LINE else f"{name} {value} ({origin.where})"

    def set_by(self, *names: str) -> str:
        """Return, for messages, a line for each of these options not set on the command line, with its
        source."""
        places = {
            (name, found.origin.where): None
            for name in names
            for config in (self, *self.sections.values())
            if (found := config.found[name]).value
            and found.origin.level not in (Level.DEFAULT, Level.COMMAND_LINE)
        }
        return "".join(f"\n{name} is set by {where}" for name, where in places)

    def explain(self, error: ConfigError) -> str:
        """Return the message, and where the options that it is about were set."""
        return str(error) + self.set_by(*error.about)

    def configuration(self) -> Configuration:
        """Return the values for `@autoconfigure`d classes, as they are: nothing overrides them again."""
        values = {
            BY_NAME[name]: found.value
            for name, found in self.found.items()
            if found.value is not None and name in BY_NAME
        }
        return Configuration(values, options={}, environ={})

    @contextlib.contextmanager
    def autoapply(self) -> Iterator[None]:
        """In the block, `configuration` is in force; a ConfigError there says where its options were set."""
        try:
            with self.configuration().autoapply():
                yield
        except ConfigError as error:
            raise type(error)(self.explain(error)) from error

    def build(self, cls: type[T]) -> T:
        """Return the instance of an `@autoconfigure`d class from these values; the same one each time."""
        if cls in self._built:
            return cast(T, self._built[cls])
        with self.autoapply():
            built = self._built[cls] = cls()
        return built

    def digest(self) -> str:
        """Return a hash of all values and of their YAML, equal on ranks that were started alike."""
        import hashlib  # OpenSSL: milliseconds at the start of every rank

        state = hashlib.sha256(json.dumps(self.values, sort_keys=True, default=str).encode())
        if self.yaml is not None:
            state.update(disagg.dump(self.yaml).encode())
        return state.hexdigest()

    def difference(self, other: Mapping[str, Any]) -> str:
        """Return the first option whose value differs from `other`'s, with both values; "" if none does."""
        for name, value in self.values.items():
            if value != other.get(name):
                level, where = self.origin(name)
                return f"--{name} is {other.get(name)!r} there and {value!r} here" + (
                    f" ({where})" if level is Level.YAML else ""
                )
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return ``{name: {"value", "source"}}``.

        For a merged dictionary, "source" is by key; if a YAML's sections differ, both are by section.
        """
        values = {}
        for name, found in self.found.items():
            each = {section: config.found[name] for section, config in self.sections.items()}
            differ = len({repr(one.value) for one in each.values()}) > 1
            value, source = found.value, _source(found)
            if differ:
                value, source = (
                    {section: one.value for section, one in each.items()},
                    {s: _source(one) for s, one in each.items()},
                )
            values[name] = {"value": str(value) if isinstance(value, Secret) else value, "source": source}
        return values


def _source(found: Found) -> Any:
    return {key: origin.where for key, origin in found.keys.items()} if found.keys else found.origin.where


def options_page() -> str:
    """Return docs/options.md: every option, from the fields."""
    lines = [
        "# Options",
        "",
        "Made by `make docs` from `mpillm/fields/`. Underscores and hyphens mean the same: `--log_dir`,"
        " `--log-dir`; upper and lower case",
        "are alike in words to choose from. The commands of one test take the same options: each uses those"
        " of its stages.",
        "A duration takes a unit: 90s, 10min, 1.5h, 600000ms; a bare number is seconds.",
    ]
    group = ""
    for field in FIELDS:
        if field.group != group:
            group = field.group
            lines += ["", f"## {group.capitalize()}", "", "| option | meaning | default |", "|---|---|---|"]
        also = "".join(f", `--{alias}`" for alias in field.aliases)
        meaning = (field.description + (f" ({', '.join(field.choices)})" if field.choices else "")).replace(
            "|", "&#124;"
        )
        default = f"`{field.shown_default}`" if field.shown_default else ""
        lines.append(f"| `--{field.name}`{also} | {meaning} | {default} |")
    return "\n".join(lines) + "\n"


def parse(
    argv: Sequence[str], parser: Parser, shown: Sequence[Field], defaults: Mapping[Field, Any] | None = None
) -> RunConfig:
    """Return all fields' values, from the command line, the environment, a user's file and the workload.

    `shown` are in --help, and may be the command's own; other fields are accepted, too, because the commands
    of a test share their options. The command's `defaults` override the fields'. ConfigError: names the
    source.
    """
    known = _with_all(shown)
    add_fields(parser, known, shown, defaults)
    return _resolved(layers.stated(parser.texts(argv), known, defaults))


def parse_each(argv: Sequence[str], parser: Parser, shown: Sequence[Field]) -> list[RunConfig]:
    """As `parse`, for every pair of a workload and a scenario: lists of them mean several tests."""
    known = _with_all(shown)
    add_fields(parser, known, shown)
    options = parser.texts(argv)
    made = []
    for benchmark in layers.said(layers.of_the_user(options, None), fields.benchmarks).value or (None,):
        named = options if benchmark is None else {**options, "benchmarks": benchmark}
        scenarios = layers.said(layers.of_the_user(named, None), fields.scenarios)
        if scenarios.origin.level < Level.WORKLOAD:  # the workload's, if it has none but Server
            made.append(_resolved(layers.stated(named, known, None)))
        else:
            made += [
                _resolved(layers.stated({**named, "scenarios": scenario}, known, None))
                for scenario in scenarios.value
            ]
    return made


def _resolved(stated: Mapping[str, Found]) -> RunConfig:
    return RunConfig(resolve(stated), stated)


def _with_all(shown: Sequence[Field]) -> list[Field]:
    return list({field.name: field for field in (*FIELDS, *shown)}.values())


def parse_run(argv: Sequence[str]) -> RunConfig:
    """Return the configuration from a command line of `run`."""
    parser = Parser(
        prog="mpillm run",
        description="Run an MLPerf Inference LLM test on the ranks of this mpirun.",
        epilog="examples:\n"
        "  mpirun -n 4 python -m mpillm run --mode disaggregated --model_path DIR --save_outputs\n"
        "  mpirun -n 3 python -m mpillm run --core_type dummy --scenarios Server --server_target_qps 100"
        " --min_duration 10",
    )
    config = parse(argv, parser, RUN_FIELDS).with_yaml()
    _check_together(config)
    _check_compliance(config)
    return config


def parse_serve(argv: Sequence[str]) -> RunConfig:
    """Return the configuration that a command line of `serve` gives."""
    parser = Parser(
        prog="mpillm serve",
        description="Put an OpenAI-compatible HTTP endpoint before the ranks of this mpirun.",
        epilog="examples:\n"
        "  mpirun -n 4 python -m mpillm serve --mode disaggregated --model_path DIR\n"
        "  mpirun -n 3 python -m mpillm serve --core_type dummy --port 8080",
    )
    config = parse(argv, parser, SERVE_FIELDS, {fields.on_instance_loss: "continue"}).with_yaml()
    _check_together(config)
    if config.server_role in ("context", "generation"):
        config.half = config.server_role
    return config


def _check_together(config: RunConfig) -> None:
    for name in ("scenarios", "benchmarks"):
        if len(getattr(config, name) or ()) > 1:
            raise ConfigError(
                f"{config.named(name)}: a run is one test of one workload; start it once for each"
            )
    if config.dry_run:
        raise ConfigError(
            f"{config.named('dry_run')}: `python -m mpillm plan` shows what a run would do, without MPI"
        )
    if config.min_duration is not None and config.min_duration >= config.test_deadline:
        raise ConfigError(
            f"{config.named('min_duration')} must be less than {config.named('test_deadline')}, which would"
            " end the test first"
        )
    if config.min_output_len > config.max_output_len:
        raise ConfigError(f"{config.named('min_output_len')} is more than {config.named('max_output_len')}")
    if config.dataset == "synthetic" and config.given("dataset_path"):
        raise ConfigError(f"{config.named('dataset')} and {config.named('dataset_path')} exclude each other")
    each = config.sections.values() or [config]
    without_effect: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        (
            "--enable_chunked_context true",
            any(c.enable_chunked_context for c in each),
            ("context_chunking_policy",),
        ),
        (
            "--dataset synthetic",
            config.dataset == "synthetic",
            ("num_samples", "input_mean", "input_stdev", "output_mean", "output_stdev"),
        ),
        ("--benchmarks", config.benchmarks, ("model_scale",)),
    )
    for needed, is_there, needing in without_effect:
        for name in needing:
            if not is_there and config.given(name) and getattr(config, name) != BY_NAME[name].default:
                raise ConfigError(f"{config.named(name)} has no effect without {needed}")
    check_mode(config)


def check_mode(config: RunConfig) -> None:
    """Raise ConfigError for sizes of the instances of another mode."""
    conflicting = (
        (
            "aggregated",
            (
                "num_ctx_servers",
                "ctx_tp_size",
                "ctx_pp_size",
                "num_gen_servers",
                "gen_tp_size",
                "gen_pp_size",
            ),
        ),
        ("disaggregated", ("tensor_parallelism", "pipeline_parallelism")),
    )
    for mode, names in conflicting:
        for name in names:
            if config.mode == mode and config.given(name):
                raise ConfigError(f"{config.named(name)} has no meaning with {config.named('mode')}")


def _check_compliance(config: RunConfig) -> None:
    if config.compliance_test and config.audit_conf:
        raise ConfigError(
            f"{config.named('compliance_test')} and {config.named('audit_conf')} exclude each other:"
            " the compliance test has its own audit.config"
        )
    if (
        config.compliance_test
        and config.workload
        and config.compliance_test not in config.workload.compliance
    ):
        raise ConfigError(
            f"{config.named('compliance_test')}: {config.workload.name} is asked for"
            f" {' and '.join(config.workload.compliance)}",
            about=["compliance_test"],
        )
    if config.compliance_test and config.test_mode != "PerformanceOnly":
        raise ConfigError(
            f"{config.named('compliance_test')} is a performance run, not {config.named('test_mode')}"
        )
    if config.audit_conf and not Path(config.audit_conf).is_file():
        raise ConfigError(f"{config.named('audit_conf')}: no such file")


def run_name(config: RunConfig) -> str:
    """Return ``<workload or model>-<scenario>``, for the run directory's name."""
    return plain_name(f"{model_name(config)}-{config.scenario}")


def model_name(config: RunConfig) -> str:
    """Return what answers: the workload, the model or the core."""
    return config.benchmark_name or (Path(config.model_path).name if config.model_path else config.core_type)


def plain_name(text: str) -> str:
    """Return `text` as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)
