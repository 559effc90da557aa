"""The options of a command: found, each with where it came from, and identical on every rank."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.command_line import Parser, add_fields
from mpillm.configurator import Configuration, Field, Found
from mpillm.fields import BY_NAME, FIELDS

# What `run` shows in --help.
_RUN_GROUPS = ("workload", "topology", "model", "harness", "triton", "data", "generation", "test", "output", "deadlines")


class RunConfig:
    """Values by field name, as attributes, and the source of each."""

    def __init__(self, found: Mapping[str, Found]) -> None:
        self.found = dict(found)

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__["found"]
        if name not in found and name in BY_NAME:
            name = BY_NAME[name].name
        try:
            return found[name].value
        except KeyError:
            raise AttributeError(name) from None

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

    @property
    def workload(self) -> workloads.Workload | None:
        """The workload, scaled as this command wants it."""
        return workloads.get(self.benchmark, self.model_scale) if self.benchmark else None

    def source(self, name: str) -> str:
        """Where the value came from: ``command line``, ``environment variable X``, a file, ``workload X`` or ``default``."""
        return self.found[name].source

    def given(self, name: str) -> bool:
        """Whether a person set it."""
        source = self.source(BY_NAME[name].name if name in BY_NAME else name)
        return source != "default" and not source.startswith("workload ")

    def digest(self) -> str:
        """A hash of all values and of the files that they name: the same on ranks that were started alike."""
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
        return {name: {"value": found.value, "source": found.keys or found.source} for name, found in self.found.items()}


def run_parser() -> Parser:
    """The parser of `run`, without its options."""
    return Parser(
        prog="mpillm run",
        description="Run an MLPerf Inference LLM test on the ranks of this mpirun.",
        epilog="examples:\n"
        "  mpirun -n 5 python -m mpillm run --mode disaggregated --model_path DIR --save_outputs\n"
        "  mpirun -n 3 python -m mpillm run --core_type dummy --scenarios Server --server_target_qps 100 --min_duration 10",
    )


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


def collect(argv: Sequence[str], fields: Sequence[Field], parser: Parser) -> RunConfig:
    """Values of `fields` from a command line and nothing else; ConfigError naming the option, the value and what is allowed."""
    add_fields(parser, fields)
    parser.parse_args(argv)
    return _found(Configuration(argv=argv, environ={}), fields)


def parse(argv: Sequence[str], parser: Parser, shown: Sequence[Field]) -> RunConfig:
    """Values of all fields: from the command line, the environment, a user's file and the workload; ConfigError names the source.

    `shown` are in --help, and may be a command's own. The other fields are taken as well: the commands of one test share their options.
    """
    fields = list(({field.name: field for field in FIELDS} | {field.name: field for field in shown}).values())
    add_fields(parser, fields, shown)
    parser.parse_args(argv)
    config = _found(Configuration(argv=argv), fields)
    if config.benchmarks and len(config.benchmarks) == 1:
        workload = config.workload
        assert workload is not None
        config = _found(Configuration(workload.defaults(config.scenarios[0]), sources=f"workload {workload.title}", argv=argv), fields)
    return config


def _found(configuration: Configuration, fields: Sequence[Field]) -> RunConfig:
    found = configuration.resolve(fields)
    return RunConfig({field.name: found.get(field, Found(None, "default")) for field in fields})


def parse_run(argv: Sequence[str]) -> RunConfig:
    """The configuration that a command line of `run` gives."""
    config = parse(argv, run_parser(), [field for field in FIELDS if field.group in _RUN_GROUPS])
    _check_together(config)
    _check_compliance(config)
    return config


def _check_together(config: RunConfig) -> None:
    for name in ("scenarios", "benchmarks"):
        if len(getattr(config, name) or ()) > 1:
            raise ConfigError(f"--{name} {','.join(getattr(config, name))}: a run is one test of one workload; start it once for each")
    if config.min_output_len > config.max_output_len:
        raise ConfigError(f"--min_output_len {config.min_output_len} is more than --max_output_len {config.max_output_len}")
    if config.core_type == "torch" and not config.model_path:
        raise ConfigError(
            "--core_type torch needs --model_path: a Hugging Face folder, or the preset tiny-llama"
            " (python -m mpillm fetch-model smollm2-135m brings a small real model)"
        )
    if config.dataset == "synthetic" and config.given("dataset_path"):
        raise ConfigError("--dataset synthetic and --dataset_path exclude each other")
    if config.server_target_qps == 0:
        raise ConfigError("--server_target_qps 0: expected more than 0")
    conflicting = (
        ("aggregated", ("num_ctx_servers", "ctx_tp_size", "ctx_pp_size", "num_gen_servers", "gen_tp_size", "gen_pp_size")),
        ("disaggregated", ("tensor_parallelism", "pipeline_parallelism")),
    )
    for mode, names in conflicting:
        for name in names:
            if config.mode == mode and config.given(name) and not config.disagg_config:
                raise ConfigError(f"--{name} has no meaning with --mode {mode}")


def _check_compliance(config: RunConfig) -> None:
    if config.compliance_test and config.audit_conf:
        raise ConfigError(f"--compliance_test {config.compliance_test} and --audit_conf exclude each other: the test has an audit.config")
    if config.compliance_test and config.test_mode != "PerformanceOnly":
        raise ConfigError(f"--compliance_test {config.compliance_test} is a performance run, not --test_mode {config.test_mode}")
    if config.audit_conf and not Path(config.audit_conf).is_file():
        raise ConfigError(f"--audit_conf {config.audit_conf}: no such file")


def run_name(config: RunConfig) -> str:
    """``<workload or model>-<scenario>``, for the run directory's name."""
    model = config.benchmark or (Path(config.model_path).name if config.model_path else config.core_type)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"{model}-{config.scenario}")
