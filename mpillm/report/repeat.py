"""From a run directory back to the command that made it."""

from __future__ import annotations

import shlex
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

# Files that a run keeps in its directory, by the option that named them.
_KEPT = {"disagg_config": "disagg.yaml", "user_conf": "user.conf", "audit_conf": "audit.config"}
_NOT_OF_THE_TEST = ("log_dir", "dry_run", "force", "config_file", "config_suffix")


def said_options(run: Path) -> list[str]:
    """Return the options that the user gave a run: on its command line, and by environment variables.

    Raises ConfigError if config.json is damaged.
    """
    words = []
    file = run / "config.json"
    with as_written(file):
        for name, entry in read_json(file).items():
            value, source = entry["value"], entry["source"]
            if isinstance(source, dict):  # each flag's own
                value = {key: value[key] for key, where in source.items() if _said(where)}
            elif not _said(source):
                continue
            if name not in ("log_dir", "force") and value not in (None, {}, str(Secret(""))):
                words += [f"--{name}", BY_NAME[name].text(value)]
    return words


def _said(source: str) -> bool:
    return source.startswith(("command line", "environment variable "))


def shell_line(words: list[str]) -> str:
    """Return words for a shell; options stay as they are."""
    return " ".join(shlex.quote(word) for word in words)


def repeated(run: RunFiles) -> tuple[list[str], list[str]]:
    """Return the options that repeat a run, and notes on what is different here: software and options.

    Raises ConfigError if that can't be known.
    """
    words, notes = options_again(run.path)
    if (run.path / ENVIRONMENT).exists():
        notes = [*differences(read_object(run.path / ENVIRONMENT), describe_environment()), *notes]
    else:
        notes.insert(0, f"no {ENVIRONMENT}: nothing is known of the software that it ran with")
    control = sum(rank.get("instance") is None for rank in run.plan_ranks)
    if "control_ranks" not in run.config and control in CONTROL_RANKS and not run.value("disagg_config"):
        words += ["--control_ranks", str(control)]
        notes.append(f"--control_ranks {control} is stated: its version of mpillm chose so")
    nodes = {str(rank.get("node")) for rank in run.plan_ranks}
    if len(nodes) > 1:
        named = ", ".join(sorted(nodes))
        notes.append(f"it ran on {len(nodes)} nodes ({named}): name as many with --mpirun_options")
    return words, notes


def options_again(run: Path) -> tuple[list[str], list[str]]:
    """Return the options of `run` that give the values of a run again, and notes on what is different here.

    A file that is gone or changed is replaced by the run's own copy; a value that would be another one here,
    since a configuration file, a workload or a default has changed, is stated. Raises ConfigError if the run
    directory is damaged, or this version can't run it.
    """
    words, notes = said_options(run), []
    file = run / "config.json"
    recorded = read_object(file)
    with as_written(file):
        then = {name: entry["value"] for name, entry in recorded.items() if name in BY_NAME}
        sources = {name: str(entry["source"]) for name, entry in recorded.items()}
    for gone in sorted(recorded.keys() - BY_NAME.keys()):
        notes.append(f"--{gone} {recorded[gone]['value']}: this version has no such option")
    for name, copy in _KEPT.items():
        if then.get(name) and (why := _changed(Path(then[name]), run / copy)):
            notes.append(f"--{name} {then[name]} {why}: {run / copy} is taken")
            words = [*_without(words, name), f"--{name}", str(run / copy)]
    if then.get("config_file") and (why := _not_read_again(Path(then["config_file"]))):
        notes.append(f"--config_file {then['config_file']} {why}: its values are stated")
        words = _without(_without(words, "config_file"), "config_suffix")
    now = parse_run(words)
    for name in then:
        if name in _NOT_OF_THE_TEST or name in _KEPT or _is_same(then[name], now, name, run):
            continue
        if isinstance(recorded[name]["source"], dict):
            notes.append(f"{name} was {then[name]}; here it is {getattr(now, name)}")
            continue
        text = BY_NAME[name].text(then[name]) if then[name] is not None else ""
        if not text:
            notes.append(f"{name} had no value; here it is {getattr(now, name)} ({now.where(name)})")
            continue
        notes.append(
            f"--{name} {text} ({sources[name]}) is stated: here it would be {getattr(now, name)}"
            f" ({now.where(name)})"
        )
        words += [f"--{name}", text]
    parse_run(words)
    return words, notes


def _is_same(then: Any, now: RunConfig, name: str, run: Path) -> bool:
    """Return whether an option has its recorded value; a data set that was made for the run is made again."""
    value = now.to_json()[name]["value"]
    made = (
        name == "dataset_path"
        and then is not None
        and Path(str(then)).absolute() == (run / "dataset").absolute()
    )
    return made or _plain(value) == _plain(then)


def _plain(value: Any) -> Any:
    """Return a value as JSON would give it back."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _changed(original: Path, copy: Path) -> str:
    """Return why the original can't be taken ("is gone", "has changed"); "" if it can."""
    if not original.exists():
        return "is gone"
    if copy.name != "user.conf":  # the others are kept in a form of their own, or as they are named
        return ""
    try:
        text = original.read_text(encoding="utf-8-sig").strip()
        return "" if text in copy.read_text(encoding="utf-8") else "has changed"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{original}: {error}") from error


def _not_read_again(config_file: Path) -> str:
    """Return why a configuration file is not; "" if it is. A directory may be a stranger's, and name any."""
    if not config_file.exists():
        return "is gone"
    return "is a program, which is not run again" if config_file.suffix == ".py" else ""


def _without(words: list[str], name: str) -> list[str]:
    place = words.index(f"--{name}") if f"--{name}" in words else len(words)
    return words[:place] + words[place + 2 :]
