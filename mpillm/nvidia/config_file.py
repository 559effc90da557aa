"""The user's configuration file: Python in one of NVIDIA's forms, or YAML with the same names."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, nearest
from disagg.text_file import read_text
from disagg.yaml_text import CONSTRUCTOR_ERRORS, cut, strict_loader
from mpillm import user_config
from mpillm.nvidia import tree_files
from mpillm.nvidia.unsupported_fields import UNSUPPORTED_FIELDS
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, AllFields
from mpillm.options.fields.general import INTERACTIVE
from mpillm.options.sources import OptionValue, Source
from mpillm.programs.load_clients.client_files import check_no_client_file
from mpillm.user_config import AccuracyTarget, ConfigRegistry, HarnessType, PowerSetting
from mpillm.workloads import accuracy_of, plain_form

# Fields that distinguish the configurations of a file.
KEYS = (
    AllFields.benchmarks,
    AllFields.scenarios,
    AllFields.harness_type,
    AllFields.accuracy_target,
    AllFields.power_setting,
    AllFields.system_name,
    AllFields.config_suffix,
)
# Names in NVIDIA's classes.
_SHORT = {"benchmark": "benchmarks", "scenario": "scenarios", "system": "system_name"}
_SETTINGS: Mapping[type, Field] = {
    HarnessType: AllFields.harness_type,
    AccuracyTarget: AllFields.accuracy_target,
    PowerSetting: AllFields.power_setting,
}


Values = dict[str, tuple[Any, str]]
"""Values by name, each with its file:line."""


@dataclass(frozen=True)
class FileConfig:
    """One configuration of a file: values by field, each with its line."""

    name: str
    where: str  # file:line
    values: dict[Field, Any]
    lines: dict[Field, str]  # file:line

    def matches(self, keys: Mapping[Field, Any]) -> bool:
        """Return whether no value in `keys` differs from the configuration's value."""
        others = keys.keys() - {AllFields.benchmarks, AllFields.scenarios}
        return all(self.values.get(key) in (None, keys[key]) for key in others) and any(
            _same(name, other) and _same(scenario, other_scenario)
            for name, scenario in _tests(self.values)
            for other, other_scenario in _tests(keys)
        )

    def n_explicit(self, keys: Mapping[Field, Any]) -> int:
        """Return the number of fields in `keys` for which the configuration has a value."""
        return len(keys.keys() & self.values.keys())

    def __str__(self) -> str:
        keys = (f"{key.name} {_format_value(self.values[key])}" for key in KEYS if key in self.values)
        return f"{self.name} ({self.where}: {', '.join(keys) or 'for anything'})"


def _same(a: str | None, b: str | None) -> bool:
    return a is None or b is None or a == b


def _tests(values: Mapping[Field, Any]) -> Iterator[tuple[str | None, str | None]]:
    """Yield pairs of a workload and a scenario; None matches any."""
    for name in values.get(AllFields.benchmarks) or (None,):
        for scenario in values.get(AllFields.scenarios) or (None,):
            yield _plain_and_scenario(name, scenario) if name else (None, scenario)


def _plain_and_scenario(name: str, scenario: str | None) -> tuple[str, str | None]:
    """Convert a workload's interactive form to the scenario Interactive of the workload."""
    plain = plain_form(name)
    is_form = name != plain and scenario in (None, "Server", INTERACTIVE)
    return (plain, INTERACTIVE) if is_form else (name, scenario)


def _with_implied_keys(values: Mapping[Field, Any]) -> dict[Field, Any]:
    """Add the scenario and target that a benchmark's name implies, such as llama2-70b-interactive-99.9."""
    names = [accuracy_of(name) for name in values.get(AllFields.benchmarks) or ()]
    keys = dict(values)
    if len({target for _, target in names} - {None}) == 1:
        keys[AllFields.accuracy_target] = next(target for _, target in names if target is not None)
        keys[AllFields.benchmarks] = tuple(name for name, _ in names)
    scenarios = values.get(AllFields.scenarios) or (None,)
    if len(names) == len(scenarios) == 1:
        name, scenario = _plain_and_scenario(names[0][0], scenarios[0])
        keys[AllFields.benchmarks] = (name,)
        if scenario:
            keys[AllFields.scenarios] = (scenario,)
    return keys


def load(
    path: str, keys: Mapping[Field, Any], test_mode: str, compliance_test: str | None
) -> dict[str, OptionValue]:
    """Return the values of the configuration that matches `keys`.

    A file in NVIDIA's newer form may have other values for accuracy and compliance tests. If several
    configurations match, those with the most fields of `keys` are preferred, and among them the one with the
    fields' defaults. Raises ConfigError if none or several remain.
    """
    entries = _entries(path, tree_files.KindOfTest(test_mode, compliance_test))
    if not entries:
        why = ": no class has @ConfigRegistry.register(…)" if Path(path).suffix == ".py" else ""
        raise ConfigError(f"--config_file {path}: no configuration in it{why}")
    keys = _with_implied_keys(keys)
    matches = [entry for entry in entries if entry.matches(keys)]
    if not matches:
        names = ", ".join(f"{field.name} {_format_value(value)}" for field, value in keys.items())
        raise ConfigError(
            f"--config_file {path}: no configuration for {names}; there are: {'; '.join(map(str, entries))}"
        )
    n_explicit = max(entry.n_explicit(keys) for entry in matches)
    matches = [entry for entry in matches if entry.n_explicit(keys) == n_explicit]
    for field in KEYS:
        if field not in keys and field.default is not None:
            matches = [entry for entry in matches if entry.matches({field: field.default})] or matches
    if (suffix := AllFields.config_suffix) not in keys:
        matches = _first_variants(matches)
    elif suffix not in matches[0].values:
        raise ConfigError(f"--config_file {path}: no configuration for {suffix.name} {keys[suffix]}")
    if len(matches) > 1:
        raise ConfigError(
            f"--config_file {path}: several configurations fit: {'; '.join(map(str, matches))};"
            f" {_differing(matches)}"
        )
    entry = matches[0]
    without_effect = [field for field in UNSUPPORTED_FIELDS.values() if field in entry.values]
    with_effect = [field for field in entry.values if field not in without_effect]
    return {
        field.name: OptionValue(entry.values[field], Source.FILE, entry.lines[field])
        for field in (*with_effect, *without_effect)
    }


def _first_variants(matches: Sequence[FileConfig]) -> list[FileConfig]:
    """Return for each set of keys the first configuration with a variant, as in NVIDIA's registry.

    If none has a variant, return all with these keys.
    """
    alike: dict[tuple[str, ...], list[FileConfig]] = {}
    for entry in matches:
        keys = tuple(
            _format_value(entry.values.get(key)) for key in KEYS if key is not AllFields.config_suffix
        )
        alike.setdefault(keys, []).append(entry)
    return [
        entry
        for same in alike.values()
        for entry in [entry for entry in same if AllFields.config_suffix in entry.values][:1] or same
    ]


def _format_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _differing(matches: Sequence[FileConfig]) -> str:
    names = [
        f"--{key.name}"
        for key in KEYS
        if len({_format_value(entry.values.get(key)) for entry in matches}) > 1
    ]
    return (
        f"choose by {', '.join(names)}" if names else "they have the same keys: keep one of them in the file"
    )


def _entries(path: str, kind: tree_files.KindOfTest) -> tuple[FileConfig, ...]:
    file = Path(path)
    text = read_text(path, "--config_file ")
    if file.suffix == ".py":
        return _python_entries(path, text, kind)
    if file.suffix in (".yaml", ".yml"):
        return tuple(_yaml_entries(path, text))
    raise ConfigError(f"--config_file {path}: must be a file .py, .yaml or .yml")


def _entry(path: str, name: str, line: int, items: Mapping[str, tuple[Any, str]]) -> FileConfig:
    """Check the values of a configuration. `items`: values by name, each with its file:line.

    Raises ConfigError for an unknown name, or a wrong value.
    """
    values: dict[Field, Any] = {}
    lines: dict[Field, str] = {}
    for written, (value, where) in items.items():
        key = written.replace("-", "_")
        if (unsupported := UNSUPPORTED_FIELDS.get(key)) is not None:
            values[unsupported] = value if isinstance(value, (bool, int, float, str)) else str(value)
            lines[unsupported] = where
            continue
        field = BY_NAME.get(_SHORT.get(key, key))
        if field is AllFields.config_file:
            raise ConfigError(f"{where}: {written} can be given only on the command line")
        if field is None:
            raise ConfigError(f"{where}: there is no option {written}{nearest(key, [*BY_NAME, *_SHORT])}")
        checked = field.check(value, f"{where}: {written}")
        if field in values and values[field] != checked:
            raise ConfigError(
                f"{where}: {written} is {_format_value(checked)},"
                f" but {_format_value(values[field])} in {lines[field]}"
            )
        values[field] = checked
        lines[field] = where
    keys = _with_implied_keys(values)
    benchmarks, target = AllFields.benchmarks, AllFields.accuracy_target
    if values.get(target, keys.get(target)) != keys.get(target):
        place = f"{lines[benchmarks]}: benchmark {_format_value(values[benchmarks])}"
        raise ConfigError(
            f"{place} means {target.name} {keys[target]}, but {lines[target]} has {values[target]}"
        )
    for implied in keys.keys() - values.keys():
        lines[implied] = lines[benchmarks]
    return FileConfig(name, f"{path}:{line}", keys, lines)


# --- Python ---


def _python_entries(path: str, text: str, kind: tree_files.KindOfTest) -> tuple[FileConfig, ...]:
    with tree_files.importable(path):
        module = _run(path, text)
        items = [*_classes(path), *tree_files.exports(module, path, text, kind)]
    return tuple(_entry(path, name, line, values) for name, line, values in items)


def _classes(path: str) -> Iterator[tuple[str, int, Values]]:
    """Yield the registered classes: name, line, and values by name with the file:line of each."""
    lines = functools.cache(_lines)
    for cls, settings, variant in ConfigRegistry.registered:
        line = lines(path).get((cls.__name__, ""), 1)
        items: Values = {}
        for base in reversed(cls.__mro__[:-1]):
            file = getattr(sys.modules.get(base.__module__), "__file__", None) or path
            for name, value in vars(base).items():
                if name.startswith("_"):
                    continue
                where = f"{file}:{lines(file).get((base.__name__, name), 1)}"
                if (callable(value) and not isinstance(value, type)) or isinstance(
                    value, (property, classmethod, staticmethod)
                ):
                    raise ConfigError(f"{where}: {name}: a configuration has values, no methods")
                value = tree_files.with_unit(name, value, where)
                items[name] = (tree_files.in_tree(name, value, path), where)
        for setting in settings:
            name = _SETTINGS[type(setting)].name
            if name in items:
                raise ConfigError(
                    f"{items[name][1]}: {name} is set here, and by ConfigRegistry.register in line {line}"
                )
            items[name] = (setting, f"{path}:{line}")
        if variant:
            items[AllFields.config_suffix.name] = (variant, f"{path}:{line}")
        yield cls.__name__, line, items


def _run(path: str, text: str) -> types.ModuleType:
    """Load the file as a module. Its classes are then in `ConfigRegistry.registered`.

    Raises ConfigError, with the line, if the file raises an error.
    """
    name = "mpillm_user_configuration"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    ConfigRegistry.registered = []
    sys.modules[name] = module
    try:
        # The file must not write into the command's output, such as `plan --format json`.
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(text, path, "exec"), vars(module))
        return module
    except SyntaxError as error:
        raise ConfigError(f"{error.filename or path}:{error.lineno or 1}: {error.msg}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's file raises
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        hint = ""
        if isinstance(error, NameError) and error.name in vars(user_config):
            hint = f"; {error.name} comes with `from {user_config.__name__} import *`, which {path} lacks"
        raise ConfigError(
            f"{path}:{frames[-1].lineno if frames else 1}: {type(error).__name__}: {error}{hint}"
        ) from None


def _lines(file: str) -> dict[tuple[str, str], int]:
    """Return the lines of classes by (name, ""), and of their attributes by (class, attribute)."""
    lines: dict[tuple[str, str], int] = {}
    for node in ast.walk(ast.parse(read_text(file))):
        if isinstance(node, ast.ClassDef):
            lines[node.name, ""] = node.lineno
            for statement in node.body:
                targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Name):
                        lines[node.name, target.id] = statement.lineno
    return lines


# --- YAML ---


def _yaml_entries(path: str, text: str) -> Iterator[FileConfig]:
    """Yield the configurations of a YAML file: a mapping, or a list of mappings; `name` is optional."""
    import yaml

    try:
        root = yaml.compose(text, yaml.SafeLoader)
        data = yaml.load(text, strict_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {cut(error.problem or error.context)}"
        ) from None
    except (yaml.YAMLError, RecursionError, *CONSTRUCTOR_ERRORS) as error:
        raise ConfigError(f"{path}: not valid YAML: {cut(error)}") from None
    check_no_client_file("--config_file", path, data)
    nodes = root.value if isinstance(root, yaml.SequenceNode) else [root]
    for number, (node, values) in enumerate(
        zip(nodes, data if isinstance(data, list) else [data], strict=True), 1
    ):
        if not isinstance(values, dict):
            line = node.start_mark.line + 1 if node is not None else 1
            raise ConfigError(f"{path}:{line}: must be a mapping of options, or a list of such mappings")
        lines = _key_lines(node, {})
        items = {
            str(key): (value, f"{path}:{lines.get(str(key), node.start_mark.line + 1)}")
            for key, value in values.items()
        }
        name, _ = items.pop("name", (f"configuration {number}", ""))
        yield _entry(path, str(name), node.start_mark.line + 1, items)


def _key_lines(node: Any, known: dict[int, dict[str, int]]) -> dict[str, int]:
    """Return the line of every key of a mapping, with merged keys (``<<``).

    `known`: results by node. Without them, nested aliases could take exponential time.
    """
    if id(node) in known:
        return known[id(node)]
    merged: dict[str, int] = {}
    own: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            for source in value.value if value.id == "sequence" else [value]:
                merged = _key_lines(source, known) | merged
        else:
            own[str(key.value)] = line
    known[id(node)] = merged | own
    return known[id(node)]
