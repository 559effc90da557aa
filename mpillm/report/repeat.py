"""Reconstruct the command of a run from its directory."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from disagg import CONTROL_RANKS
from disagg.errors import ConfigError
from mpillm.files import as_written, read_json, read_object
from mpillm.options.fields import BY_NAME
from mpillm.options.options import parse_run
from mpillm.options.parsers import Secret
from mpillm.options.run_config import RunConfig
from mpillm.report.run_environment import ENVIRONMENT, describe_environment, differences
from mpillm.report.run_files import RunFiles

# Copies of files in a run directory, by the option that named the file.
_COPIES = {"disagg_config": "disagg.yaml", "user_conf": "user.conf", "audit_conf": "audit.config"}
_NOT_OF_THE_TEST = ("log_dir", "dry_run", "force", "config_file", "config_suffix")


def user_options(run: Path) -> list[str]:
    """Return the options that the user gave a run: on its command line, and by environment variables.

    Raises ConfigError if config.json is damaged.
    """
    args = []
    file = run / "config.json"
    with as_written(file):
        for name, entry in read_json(file).items():
            value, source = entry["value"], entry["source"]
            if isinstance(source, dict):  # one source for each flag
                value = {key: value[key] for key, where in source.items() if _is_user_set(where)}
            elif not _is_user_set(source):
                continue
            if name not in ("log_dir", "force") and value not in (None, {}, str(Secret(""))):
                args += [f"--{name}", BY_NAME[name].text(value)]
    return args


def _is_user_set(source: str) -> bool:
    return source.startswith(("command line", "environment variable "))


def without(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Return options, each a name and its value, except `names`."""
    pairs = zip(args[::2], args[1::2], strict=True)
    return [arg for name, value in pairs if name.removeprefix("--") not in names for arg in (name, value)]


def shell_line(args: list[str]) -> str:
    """Return arguments quoted for a shell."""
    return " ".join(shlex.quote(arg) for arg in args)


def repeated(run: RunFiles) -> tuple[list[str], list[str]]:
    """Return the options that repeat a run, and notes on software and options that differ here.

    Raises ConfigError if the options cannot be determined.
    """
    args, notes = options_again(run.path)
    if (run.path / ENVIRONMENT).exists():
        notes = [*differences(read_object(run.path / ENVIRONMENT), describe_environment()), *notes]
    else:
        notes.insert(0, f"no {ENVIRONMENT}: the software that it ran with is unknown")
    control = sum(rank.get("instance") is None for rank in run.plan_ranks)
    if "control_ranks" not in run.config and control in CONTROL_RANKS and not run.value("disagg_config"):
        args += ["--control_ranks", str(control)]
        notes.append(f"--control_ranks {control} is added: its version of mpillm chose this number")
    nodes = {str(rank.get("node")) for rank in run.plan_ranks}
    if len(nodes) > 1:
        named = ", ".join(sorted(nodes))
        notes.append(f"it ran on {len(nodes)} nodes ({named}): name as many with --mpirun_options")
    return args, notes


def options_again(run: Path) -> tuple[list[str], list[str]]:
    """Return the options of `run` that restore the values of a run, and notes on values that differ here.

    A file that is missing or changed is replaced by the run's own copy. A value that would differ here,
    because a configuration file, a workload or a default has changed, is added as an option. Raises
    ConfigError if the run directory is damaged, or this version cannot run it.
    """
    args, notes = user_options(run), []
    file = run / "config.json"
    recorded = read_object(file)
    with as_written(file):
        then = {name: entry["value"] for name, entry in recorded.items() if name in BY_NAME}
        sources = {name: str(entry["source"]) for name, entry in recorded.items()}
    for name in sorted(recorded.keys() - BY_NAME.keys()):
        notes.append(f"--{name} {recorded[name]['value']}: this version has no such option")
    for name, copy in _COPIES.items():
        if then.get(name) and (why := _changed(Path(then[name]), run / copy)):
            notes.append(f"--{name} {then[name]} {why}: {run / copy} is used")
            args = [*without(args, [name]), f"--{name}", str(run / copy)]
    if then.get("config_file") and (why := _not_read_again(Path(then["config_file"]))):
        notes.append(f"--config_file {then['config_file']} {why}: its values are added")
        args = without(args, ["config_file", "config_suffix"])
    now = parse_run(args)
    for name in then:
        if name in _NOT_OF_THE_TEST or name in _COPIES or _is_same(then[name], now, name, run):
            continue
        if isinstance(recorded[name]["source"], dict):
            notes.append(f"{name} was {then[name]}; here it is {getattr(now, name)}")
            continue
        text = BY_NAME[name].text(then[name]) if then[name] is not None else ""
        if not text:
            notes.append(f"{name} had no value; here it is {getattr(now, name)} ({now.where(name)})")
            continue
        notes.append(
            f"--{name} {text} ({sources[name]}) is added: here it would be {getattr(now, name)}"
            f" ({now.where(name)})"
        )
        args += [f"--{name}", text]
    parse_run(args)
    return args, notes


def _is_same(then: Any, now: RunConfig, name: str, run: Path) -> bool:
    """Return whether an option has its recorded value; a data set created for the run counts as the same."""
    value = now.to_json()[name]["value"]
    is_created = (
        name == "dataset_path"
        and then is not None
        and Path(str(then)).absolute() == (run / "dataset").absolute()
    )
    return is_created or _plain(value) == _plain(then)


def _plain(value: Any) -> Any:
    """Return a value as JSON would give it back."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _changed(original: Path, copy: Path) -> str:
    """Return why the original cannot be used ("is missing", "has changed"); "" if it can."""
    if not original.exists():
        return "is missing"
    if copy.name != "user.conf":  # copies of other files are not compared
        return ""
    try:
        text = original.read_text(encoding="utf-8-sig").strip()
        return "" if text in copy.read_text(encoding="utf-8") else "has changed"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{original}: {error}") from error


def _not_read_again(config_file: Path) -> str:
    """Return why a configuration file is not read again; "" if it is. The run directory is untrusted."""
    if not config_file.exists():
        return "is missing"
    return "is a program, which is not run again" if config_file.suffix == ".py" else ""
