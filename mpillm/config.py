"""The options of a run: parsed, each with where it came from, and identical on every rank."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from disagg.errors import ConfigError, nearest
from mpillm.fields import FIELDS, Field


class Parser(argparse.ArgumentParser):
    """argparse with hyphens and underscores alike, no abbreviations, and errors that name the nearest option."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("usage", f"python -m {kwargs['prog']} [options]")
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, but unknown words are a ConfigError."""
        values, unknown = self.parse_known_args([_underscored(arg) for arg in args or ()], namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            options = [option for action in self._actions for option in action.option_strings]
            known = nearest(name, options) if name.startswith("-") else ""
            raise ConfigError(f"{self.prog}: unknown option {unknown[0]}{known}")
        return values

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def _underscored(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def add_fields(parser: argparse.ArgumentParser, fields: Sequence[Field]) -> None:
    """An option for each field, in its group; without a value a boolean means true."""
    groups: dict[str, Any] = {}
    for field in fields:
        group = groups.setdefault(field.group, None) or parser.add_argument_group(field.group)
        groups[field.group] = group
        is_flag = isinstance(field.default, bool)
        default = "" if field.default in (None, {}) else f" [default: {field.default}]"
        choices = f": {', '.join(field.choices)}" if field.choices else ""
        group.add_argument(
            f"--{field.name}",
            help=(field.description + choices + default).replace("%", "%%"),
            metavar=field.name.rpartition("_")[2].upper(),
            nargs="?" if is_flag else None,
            const="true" if is_flag else None,
        )


class RunConfig:
    """Values by field name, as attributes, and the source of each."""

    def __init__(self, values: dict[str, Any], sources: dict[str, str]) -> None:
        self.values = values
        self.sources = sources

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def given(self, name: str) -> bool:
        """Whether a person set it."""
        return self.sources[name] != "default"

    def digest(self) -> str:
        """A hash of all values and of the files that they name: the same on ranks that were started alike."""
        state = hashlib.sha256(json.dumps(self.values, sort_keys=True, default=str).encode())
        if self.disagg_config and Path(self.disagg_config).is_file():
            state.update(Path(self.disagg_config).read_bytes())
        return state.hexdigest()

    def difference(self, other: dict[str, Any]) -> str:
        """The first option whose value differs, with both values; empty if none does."""
        for name, value in self.values.items():
            if value != other.get(name):
                return f"--{name} is {value!r} there and {other.get(name)!r} here"
        return ""

    def to_json(self) -> dict[str, Any]:
        """``{name: {"value", "source"}}``"""
        return {name: {"value": value, "source": self.sources[name]} for name, value in self.values.items()}


def run_parser() -> Parser:
    """The parser of `run`, its options made from the fields."""
    parser = Parser(
        prog="mpillm run",
        description="Run an MLPerf Inference LLM test on the ranks of this mpirun.",
        epilog="examples:\n"
        "  mpirun -n 5 python -m mpillm run --mode disaggregated --model_path DIR --save_outputs\n"
        "  mpirun -n 3 python -m mpillm run --core_type dummy --scenarios Server --server_target_qps 100 --min_duration 10",
    )
    add_fields(parser, FIELDS)
    return parser


def options_page() -> str:
    """docs/options.md: every option of `run`, from the fields."""
    lines = [
        "# The options of `run`",
        "",
        "Made by `make docs` from `mpillm/fields.py`. Underscores and hyphens mean the same: `--log_dir`, `--log-dir`.",
    ]
    group = ""
    for field in FIELDS:
        if field.group != group:
            group = field.group
            lines += ["", f"## {group.capitalize()}", "", "| option | meaning | default |", "|---|---|---|"]
        meaning = field.description + (f" ({', '.join(field.choices)})" if field.choices else "")
        default = "" if field.default in (None, {}) else f"`{field.default}`"
        lines.append(f"| `--{field.name}` | {meaning.replace('|', '&#124;')} | {default} |")
    return "\n".join(lines) + "\n"


def collect(texts: dict[str, str | None], fields: Sequence[Field]) -> RunConfig:
    """Values of `fields` from the texts that argparse found; ConfigError naming the option, the value and what is allowed."""
    values = {f.name: f.default if (text := texts[f.name]) is None else f.parse(text, f"--{f.name}") for f in fields}
    return RunConfig(values, {f.name: "default" if texts[f.name] is None else "command line" for f in fields})


def parse_run(argv: Sequence[str]) -> RunConfig:
    """The configuration that a command line of `run` gives."""
    config = collect(vars(run_parser().parse_args(argv)), FIELDS)
    _check_together(config)
    return config


def _check_together(config: RunConfig) -> None:
    if config.min_output_len > config.max_output_len:
        raise ConfigError(f"--min_output_len {config.min_output_len} is more than --max_output_len {config.max_output_len}")
    if config.core_type == "torch" and not config.model_path:
        raise ConfigError(
            "--core_type torch needs --model_path: a Hugging Face folder, or the preset tiny-llama"
            " (python -m mpillm fetch-model smollm2-135m brings a small real model)"
        )
    if config.dataset == "synthetic" and config.dataset_path:
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


def run_name(config: RunConfig) -> str:
    """``<model>-<scenario>``, for the run directory's name."""
    model = Path(config.model_path).name if config.model_path else config.core_type
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"{model}-{config.scenarios}")
