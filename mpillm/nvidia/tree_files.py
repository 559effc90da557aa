"""NVIDIA's configuration files: the modules that they import, and the meaning of their values in mpillm.

The newer form is a file ``configs/<system>/<scenario>/<benchmark>.py`` in a tree (`closed/NVIDIA` of a
submission), or ``configs/<benchmark>/<system>/<backend>/<scenario>/harness.py``, since v6.1. Its dictionary
EXPORTS has values by field for each `WorkloadSetting`. It imports the fields from the tree's package `code`,
since v6.1 `nv_mlpinf`. While the file is loaded, modules with those names provide mpillm's fields, and no
code of that package runs. The older form is a file ``configs/<benchmark>/<scenario>/__init__.py`` with
registered classes for many systems (`mpillm.user_config`).
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError, nearest
from mpillm import user_config
from mpillm.files import path_exists
from mpillm.nvidia.unsupported_fields import UNSUPPORTED_FIELDS
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, AllFields
from mpillm.options.fields.general import INTERACTIVE, SCENARIOS
from mpillm.options.parsers import positive
from mpillm.workloads import WORKLOADS

_FIELD_MODULES = ("gen_engines", "general", "harness", "loadgen", "meta", "models", "power", "triton")
_PATHS = (AllFields.llm_gen_config_path, AllFields.dataset_path)  # relative to the top of the tree
_DURATIONS = (AllFields.min_duration.name, AllFields.max_duration.name)
_ANY_SYSTEM = "minimal"
_OLDER = "__init__"
_NEWEST = ("harness", "server")
_PACKAGES = ("code", "nv_mlpinf")
_FLAGS = ("trtllm_build_flags", "trtllm_checkpoint_flags", "trtllm_runtime_flags")
_SETTING = ("harness_type", "accuracy_target", "power_setting")
_RUNTIME_FIELDS = {  # flags of the runtime in mpillm
    "max_concurrency": Field("max_concurrency", "concurrent requests to a server", positive),
    "workers_per_core": Field("workers_per_core", "client processes of a server", positive),
}
_BY_NAME: Mapping[str, Field] = {
    **BY_NAME,
    **UNSUPPORTED_FIELDS,
    "quantizer_outdir": AllFields.llm_quantizer_outdir,
    "readiness_timeout": AllFields.load_deadline,
    **_RUNTIME_FIELDS,
}
_FOLDERS = {"DATA_DIR": "data", "PREPROCESSED_DATA_DIR": "preprocessed_data", "MODEL_DIR": "models"}


class KindOfTest(NamedTuple):
    """Type of a test, for which a file may have other values."""

    test_mode: str
    compliance_test: str | None


class _Fields(types.ModuleType):
    """One of NVIDIA's modules of fields, with mpillm's fields."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "CoreType":
            return user_config.CoreType
        if name not in _BY_NAME:
            raise AttributeError(f"mpillm has no field {name}{nearest(name, _BY_NAME)}")
        return _BY_NAME[name]


class _MergedFlags(type):
    """Metaclass of the older form's classes; merges the flags of all bases."""

    def __new__(cls, name: str, bases: tuple[type, ...], values: dict[str, Any]) -> _MergedFlags:
        for flags in _FLAGS:
            merged: dict[str, Any] = {}
            for base in bases:
                merged |= getattr(base, flags, {})
            if merged:
                values[flags] = merged | values.get(flags, {})
        return super().__new__(cls, name, bases, values)


class _BenchmarkConfiguration(metaclass=_MergedFlags):
    """The base of the older form's classes."""


def _older_module() -> types.ModuleType:
    """Return the module `configs.configuration` of the older form."""
    module = types.ModuleType("configs.configuration")
    vars(module).update({name: one for name, one in vars(user_config).items() if not name.startswith("_")})
    vars(module)["BenchmarkConfiguration"] = _BenchmarkConfiguration
    return module


def _paths_module(tree: Path | None) -> types.ModuleType:
    """Return the module `nv_mlpinf.common.paths` of the newest form."""
    module = types.ModuleType("nv_mlpinf.common.paths")
    scratch = Path(os.environ.get("MLPERF_SCRATCH_PATH") or "build")
    vars(module).update({name: scratch / folder for name, folder in _FOLDERS.items()})
    vars(module)["PROJECT_BASE_DIR"] = tree or Path()
    return module


def _modules(tree: Path | None) -> dict[str, types.ModuleType]:
    """Return NVIDIA's modules and their packages by name."""
    modules: dict[str, types.ModuleType] = {"nv_mlpinf.common.paths": _paths_module(tree)}
    for package in _PACKAGES:
        names = (f"{package}.llmlib.fields", *(f"{package}.fields.{name}" for name in _FIELD_MODULES))
        modules |= {name: _Fields(name) for name in names}
        modules |= dict.fromkeys(
            (f"{package}.common.constants", f"{package}.common.systems.system_list"), user_config
        )
    for name in [*modules]:
        while "." in name:
            package, _, last = name.rpartition(".")
            setattr(modules.setdefault(package, types.ModuleType(package)), last, modules[name])
            name = package
    return modules | {"configs.configuration": _older_module()}  # `configs` itself comes from the tree


class _TreePath(NamedTuple):
    """Parts of a file's path in a tree."""

    tree: Path  # top folder
    workload: str
    system: str
    scenario: str


def _tree_path(path: str) -> _TreePath | None:
    """Return the parts of a file's path; None for a file outside a tree."""
    file = Path(path).absolute()
    scenario, above, *parents = (folder.name for folder in (*file.parents, Path(), Path(), Path()))
    if file.stem in _NEWEST and parents[2] == "configs":
        system, benchmark = parents[:2]
        workload = next((name for name in WORKLOADS if _letters(name) == _letters(benchmark)), benchmark)
        return _TreePath(file.parents[5], workload, system, scenario)
    if parents[0] != "configs":
        return None
    workload, system = (above, _ANY_SYSTEM) if file.stem == _OLDER else (file.stem, above)
    return _TreePath(file.parents[3], workload, system, scenario)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@contextlib.contextmanager
def importable(path: str) -> Iterator[None]:
    """Make NVIDIA's modules, the tree's files and the file's neighbors importable inside the block."""
    of_path(path)
    place = _tree_path(path)
    own_folder, tree = Path(path).absolute().parent, place and place.tree
    folders = [str(folder) for folder in (own_folder, tree) if folder]
    modules = _modules(tree)
    before, path_before = dict(sys.modules), [*sys.path]

    def is_the_files(name: str, module: Any) -> bool:
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        is_neighbor = top not in before and file is not None and own_folder in Path(file).parents[:2]
        return name in modules or is_neighbor or (tree is not None and top == "configs")

    def forget() -> None:
        for name, module in list(sys.modules.items()):
            if is_the_files(name, module):
                del sys.modules[name]

    forget()
    sys.path[:0] = folders
    sys.modules.update(modules)
    try:
        yield
    finally:
        sys.path[:] = path_before  # files of the older form add to it
        forget()
        sys.modules.update({name: before[name] for name in before.keys() - sys.modules.keys()})


def exports(
    module: types.ModuleType, path: str, text: str, kind: KindOfTest
) -> Iterator[tuple[str, int, dict[str, tuple[Any, str]]]]:
    """Yield the configurations in EXPORTS, if any: name, line, and values by name with the file:line of each.

    In a tree, the file's path determines workload, scenario and system. Values for this kind of test override
    the others.
    """
    every: Mapping[Any, Mapping[Any, Any]] = getattr(module, "EXPORTS", {})
    assigned = _assigned(text)
    literal = assigned.get("EXPORTS")
    line = literal.lineno if literal else 1
    where = f"{path}:{line}: EXPORTS"
    if not isinstance(every, Mapping):
        raise ConfigError(f"{where}: expected a dictionary of WorkloadSetting and values")
    written = [_lines(assigned, node) for node in literal.values] if isinstance(literal, ast.Dict) else []
    for number, (setting, values) in enumerate(every.items()):
        if not isinstance(setting, user_config.WorkloadSetting) or not isinstance(values, Mapping):
            raise ConfigError(
                f"{where}: {setting!r}: expected a WorkloadSetting, and a dictionary of fields and values"
            )
        lines = (
            {_BY_NAME.get(name): at for name, at in written[number].items()} if number < len(written) else {}
        )
        for field, value in _for(kind, module, setting).items():
            base = values.get(field)
            if isinstance(base, Mapping) and isinstance(value, Mapping):
                value = {**base, **value}
            values = {**values, field: value}
            lines.pop(field, None)
        flags, moved = AllFields.trtllm_runtime_flags, [*_RUNTIME_FIELDS.values()]
        if runtime := {field.name: values[field] for field in moved if field in values}:
            others = {field: value for field, value in values.items() if field not in moved}
            values = others | {flags: {**values.get(flags, {}), **runtime}}
        items: dict[str, tuple[Any, str]] = {name: (value, path) for name, value in of_path(path).items()}
        items |= {name: (getattr(setting, name), f"{path}:{line}") for name in _SETTING}
        for field, value in values.items():
            if not isinstance(field, Field):
                raise ConfigError(f"{where}: the key {field!r}: expected a field")
            # Without a line if it comes from another file, or a statement changes it.
            here = f"{path}:{lines[field]}" if field in lines else path
            value = str(value) if isinstance(value, Path) else value
            items[field.name] = (in_tree(field.name, with_unit(field.name, value, here), path), here)
        yield f"EXPORTS[{', '.join(str(getattr(setting, name).value) for name in _SETTING)}]", line, items


def _for(kind: KindOfTest, module: types.ModuleType, setting: Any) -> Mapping[Any, Any]:
    """Return a file's values for a compliance test or, without values for it, for an accuracy test."""
    of_tests: Mapping[Any, Any] = getattr(module, "COMPLIANCE_OVERRIDES", None) or {}
    by_name = {getattr(test, "value", test): values for test, values in of_tests.items()}
    of_test: Mapping[Any, Any] = by_name.get(kind.compliance_test) or {}
    if setting not in of_test and kind.test_mode == "AccuracyOnly":
        of_test = getattr(module, "ACCURACY_OVERRIDES", None) or {}
    return dict(of_test.get(setting) or {})


_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")


def with_unit(name: str, value: Any, where: str) -> Any:
    """Add the unit to a duration in a file in NVIDIA's form, where a bare number is milliseconds."""
    if name not in _DURATIONS or isinstance(value, bool) or not _NUMBER.fullmatch(str(value).strip()):
        return value
    if 0 < float(str(value)) < 1000:
        raise ConfigError(
            f"{where}: {name} {value}: a bare number in such a file is milliseconds; write '{value}s' or"
            f" '{value}ms'"
        )
    return f"{value}ms"


def of_path(path: str) -> dict[str, str]:
    """Return the workload, scenario and system in a file's path in a tree.

    Raises ConfigError for an unknown workload. The file may import modules of it, so this runs before the
    file.
    """
    place = _tree_path(path)
    if place is None or place.scenario not in (*SCENARIOS, INTERACTIVE):
        return {}
    try:
        AllFields.benchmarks.parse(place.workload, "")
    except ConfigError:
        raise ConfigError(
            f"{path}: mpillm has no workload {place.workload}; it has {', '.join(WORKLOADS)}"
        ) from None
    return {
        "benchmark": place.workload,
        "scenario": place.scenario,
        **({"system": place.system} if place.system != _ANY_SYSTEM else {}),
    }


def in_tree(name: str, value: Any, path: str) -> Any:
    """Return a path that exists only in the file's tree: as written, or below `src`.

    Submissions move `code`, or its content, to `src`.
    """
    if _BY_NAME.get(name) not in _PATHS or not isinstance(value, str) or path_exists(value):
        return value
    if (place := _tree_path(path)) is None:
        return value
    inner = Path(*Path(value).parts[1:])
    places = (place.tree / value, place.tree / "src" / value, place.tree / "src" / inner)
    return next((str(candidate) for candidate in places if path_exists(candidate)), value)


def _assigned(text: str) -> dict[str, ast.expr]:
    """Return the values that a file assigns to names outside classes and functions."""
    body = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return {target.id: node.value for node in body for target in node.targets if isinstance(target, ast.Name)}


def _lines(assigned: Mapping[str, ast.expr], node: ast.expr | None) -> dict[str, int]:
    """Return the lines of fields' names in a dictionary, and in the file's dictionaries that it includes."""
    if isinstance(node, ast.Name):
        return _lines(assigned, assigned.get(node.id))
    lines: dict[str, int] = {}
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            lines |= _lines(assigned, value) if key is None else {_name(key): key.lineno}
    return lines


def _name(key: ast.expr) -> str:
    return key.attr if isinstance(key, ast.Attribute) else key.id if isinstance(key, ast.Name) else ""
