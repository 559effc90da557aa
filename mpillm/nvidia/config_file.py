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
from mpillm.nvidia.passed_over import PASSED_OVER
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, AllFields
from mpillm.options.fields.general import INTERACTIVE
from mpillm.options.sources import OptionValue, Source
from mpillm.programs.load_clients.client_files import check_no_client_file
from mpillm.user_config import AccuracyTarget, ConfigRegistry, HarnessType, PowerSetting
from mpillm.workloads import accuracy_of, plain_form

# What a file's configurations are told apart by.
KEYS = (
    AllFields.benchmarks,
    AllFields.scenarios,
    AllFields.harness_type,
    AllFields.accuracy_target,
    AllFields.power_setting,
    AllFields.system_name,
    AllFields.config_suffix,
)
# as the reference's classes have them
_SHORT = {"benchmark": "benchmarks", "scenario": "scenarios", "system": "system_name"}
_SETTINGS: Mapping[type, Field] = {
    HarnessType: AllFields.harness_type,
    AccuracyTarget: AllFields.accuracy_target,
    PowerSetting: AllFields.power_setting,
}


Values = dict[str, tuple[Any, str]]
"""Values by name, each with its file:line."""


@dataclass(frozen=True)
class Entry:
    """One configuration of a file: values by field, each with its place."""

    name: str
    where: str  # file:line
    values: dict[Field, Any]
    lines: dict[Field, str]  # file:line

    def fits(self, wanted: Mapping[Field, Any]) -> bool:
        """Return whether it agrees with all that is `wanted`, as far as it states that."""
        others = wanted.keys() - {AllFields.benchmarks, AllFields.scenarios}
        return all(self.values.get(key) in (None, wanted[key]) for key in others) and any(
            _same(name, other) and _same(scenario, other_scenario)
            for name, scenario in _tests(self.values)
            for other, other_scenario in _tests(wanted)
        )

    def says(self, wanted: Mapping[Field, Any]) -> int:
        """Return how much of what is `wanted` it states explicitly."""
        return len(wanted.keys() & self.values.keys())

    def __str__(self) -> str:
        keys = (f"{key.name} {_shown(self.values[key])}" for key in KEYS if key in self.values)
        return f"{self.name} ({self.where}: {', '.join(keys) or 'for anything'})"


def _same(a: str | None, b: str | None) -> bool:
    return a is None or b is None or a == b


def _tests(values: Mapping[Field, Any]) -> Iterator[tuple[str | None, str | None]]:
    """Yield pairs of a workload and a scenario, None for any."""
    for name in values.get(AllFields.benchmarks) or (None,):
        for scenario in values.get(AllFields.scenarios) or (None,):
            yield _apart(name, scenario) if name else (None, scenario)


def _apart(name: str, scenario: str | None) -> tuple[str, str | None]:
    """Treat a workload's interactive form as the scenario Interactive of the workload."""
    plain = plain_form(name)
    return (
        (plain, INTERACTIVE)
        if name != plain and scenario in (None, "Server", INTERACTIVE)
        else (name, scenario)
    )


def _spelled_out(values: Mapping[Field, Any]) -> dict[Field, Any]:
    """`values`, with the scenario and target that a benchmark's name implies: llama2-70b-interactive-99.9."""
    names = [accuracy_of(name) for name in values.get(AllFields.benchmarks) or ()]
    spelled = dict(values)
    if len({target for _, target in names} - {None}) == 1:
        spelled[AllFields.accuracy_target] = next(target for _, target in names if target is not None)
        spelled[AllFields.benchmarks] = tuple(name for name, _ in names)
    scenarios = values.get(AllFields.scenarios) or (None,)
    if len(names) == len(scenarios) == 1:
        name, scenario = _apart(names[0][0], scenarios[0])
        spelled[AllFields.benchmarks] = (name,)
        if scenario:
            spelled[AllFields.scenarios] = (scenario,)
    return spelled


def load(
    path: str, given: Mapping[Field, Any], test_mode: str, compliance_test: str | None
) -> dict[str, OptionValue]:
    """Return the values of the one configuration that agrees with what is `given`, by key field.

    A file in NVIDIA's newer form may have other values for accuracy and compliance tests.
    Of several, those win that state most of it explicitly, and among these the one for the fields' defaults.
    Raises ConfigError if none or several are left.
    """
    entries = _entries(path, tree_files.KindOfTest(test_mode, compliance_test))
    if not entries:
        why = ": no class has @ConfigRegistry.register(…)" if Path(path).suffix == ".py" else ""
        raise ConfigError(f"--config_file {path}: no configuration in it{why}")
    given = _spelled_out(given)
    found = [entry for entry in entries if entry.fits(given)]
    if not found:
        wanted = ", ".join(f"{field.name} {_shown(value)}" for field, value in given.items())
        raise ConfigError(
            f"--config_file {path}: no configuration for {wanted}; there are: {'; '.join(map(str, entries))}"
        )
    most = max(entry.says(given) for entry in found)
    found = [entry for entry in found if entry.says(given) == most]
    for field in KEYS:
        if field not in given and field.default is not None:
            found = [entry for entry in found if entry.fits({field: field.default})] or found
    if (suffix := AllFields.config_suffix) not in given:
        found = _first_variants(found)
    elif suffix not in found[0].values:
        raise ConfigError(f"--config_file {path}: no configuration for {suffix.name} {given[suffix]}")
    if len(found) > 1:
        raise ConfigError(
            f"--config_file {path}: several configurations fit: {'; '.join(map(str, found))};"
            f" {_differing(found)}"
        )
    entry = found[0]
    without_effect = [field for field in PASSED_OVER.values() if field in entry.values]
    with_effect = [field for field in entry.values if field not in without_effect]
    return {
        field.name: OptionValue(entry.values[field], Source.FILE, entry.lines[field])
        for field in (*with_effect, *without_effect)
    }


def _first_variants(found: Sequence[Entry]) -> list[Entry]:
    """Return what NVIDIA's registry takes: of classes with the same keys the first that names a variant.

    One that names none counts where all name none.
    """
    alike: dict[tuple[str, ...], list[Entry]] = {}
    for entry in found:
        keys = tuple(_shown(entry.values.get(key)) for key in KEYS if key is not AllFields.config_suffix)
        alike.setdefault(keys, []).append(entry)
    return [
        entry
        for same in alike.values()
        for entry in [entry for entry in same if AllFields.config_suffix in entry.values][:1] or same
    ]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _differing(found: Sequence[Entry]) -> str:
    names = [f"--{key.name}" for key in KEYS if len({_shown(entry.values.get(key)) for entry in found}) > 1]
    return (
        f"choose by {', '.join(names)}" if names else "they have the same keys: keep one of them in the file"
    )


def _entries(path: str, kind: tree_files.KindOfTest) -> tuple[Entry, ...]:
    file = Path(path)
    text = read_text(path, "--config_file ")
    if file.suffix == ".py":
        return _python_entries(path, text, kind)
    if file.suffix in (".yaml", ".yml"):
        return tuple(_yaml_entries(path, text))
    raise ConfigError(f"--config_file {path}: must be a file .py, .yaml or .yml")


def _entry(path: str, name: str, line: int, items: Mapping[str, tuple[Any, str]]) -> Entry:
    """`items`: values by name, each with its file:line.

    Raises ConfigError for an unknown name, or a wrong value.
    """
    values: dict[Field, Any] = {}
    lines: dict[Field, str] = {}
    for written, (value, where) in items.items():
        key = written.replace("-", "_")
        if (passed_over := PASSED_OVER.get(key)) is not None:
            values[passed_over] = value if isinstance(value, (bool, int, float, str)) else str(value)
            lines[passed_over] = where
            continue
        field = BY_NAME.get(_SHORT.get(key, key))
        if field is AllFields.config_file:
            raise ConfigError(f"{where}: {written} can be given only on the command line")
        if field is None:
            raise ConfigError(f"{where}: there is no option {written}{nearest(key, [*BY_NAME, *_SHORT])}")
        checked = field.check(value, f"{where}: {written}")
        if field in values and values[field] != checked:
            raise ConfigError(
                f"{where}: {written} is {_shown(checked)}, but {lines[field]} says {_shown(values[field])}"
            )
        values[field] = checked
        lines[field] = where
    spelled = _spelled_out(values)
    benchmarks, target = AllFields.benchmarks, AllFields.accuracy_target
    if values.get(target, spelled.get(target)) != spelled.get(target):
        name_said = f"{lines[benchmarks]}: benchmark {_shown(values[benchmarks])}"
        raise ConfigError(
            f"{name_said} means {target.name} {spelled[target]}, but {lines[target]} says {values[target]}"
        )
    for implied in spelled.keys() - values.keys():
        lines[implied] = lines[benchmarks]
    return Entry(name, f"{path}:{line}", spelled, lines)


# --- Python ---


def _python_entries(path: str, text: str, kind: tree_files.KindOfTest) -> tuple[Entry, ...]:
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
                value = tree_files.in_our_unit(name, value, where)
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
    """Load the file as a module; its classes are in `ConfigRegistry.registered`.

    Raises ConfigError if it raised an error; the message names the line.
    """
    name = "mpillm_user_configuration"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    ConfigRegistry.registered = []
    sys.modules[name] = module
    try:
        # stdout is the command's: `plan --format json` may go to a file
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
    """Return the lines of classes, by (name, ""), and of attributes that they set, by (class, attribute)."""
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


def _yaml_entries(path: str, text: str) -> Iterator[Entry]:
    """One mapping is one configuration, a list of mappings is several; `name` names one."""
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
    """Return the line of every key of a mapping, with those that it merges (``<<``).

    `known`: of the nodes that were seen: a few aliases of aliases can stand for any number.
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
