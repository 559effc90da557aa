"""NVIDIA's configuration files: the modules that they import, and the meaning of their values here.

The newer form is a file ``configs/<system>/<scenario>/<benchmark>.py`` in a tree (`closed/NVIDIA` of a
submission), or ``configs/<benchmark>/<system>/<backend>/<scenario>/harness.py``, since v6.1. Its dictionary
EXPORTS has values by field for each `WorkloadSetting`. It imports the fields from the tree's package `code`,
since v6.1 `nv_mlpinf`: while the file is loaded, modules with those names give it our fields, and nothing of
that package runs. The older form, registered classes, is in `mpillm.user_config`; there it is a file
``configs/<benchmark>/<scenario>/__init__.py`` with classes for many systems.
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
from mpillm.nvidia.passed_over import PASSED_OVER
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
_OF_RUNTIME = {
    name: Field(name, f"{what}: here a flag of the runtime", positive)
    for name, what in {
        "max_concurrency": "requests at a server at once",
        "workers_per_core": "client processes of a server",
    }.items()
}
_BY_NAME: Mapping[str, Field] = {
    **BY_NAME,
    **PASSED_OVER,
    "quantizer_outdir": AllFields.llm_quantizer_outdir,
    "readiness_timeout": AllFields.load_deadline,
    **_OF_RUNTIME,
}
_FOLDERS = {"DATA_DIR": "data", "PREPROCESSED_DATA_DIR": "preprocessed_data", "MODEL_DIR": "models"}


class KindOfTest(NamedTuple):
    """What a file may have other values for."""

    test_mode: str
    compliance_test: str | None


class _Fields(types.ModuleType):
    """One of NVIDIA's modules of fields: our fields by their names there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "CoreType":
            return user_config.CoreType
        if name not in _BY_NAME:
            raise AttributeError(f"mpillm has no field {name}{nearest(name, _BY_NAME)}")
        return _BY_NAME[name]


class _MergedFlags(type):
    """Of the older form's classes: each has the flags of its bases, too."""

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
    """Return what the older form imports as `configs.configuration`."""
    module = types.ModuleType("configs.configuration")
    vars(module).update({name: one for name, one in vars(user_config).items() if not name.startswith("_")})
    vars(module)["BenchmarkConfiguration"] = _BenchmarkConfiguration
    return module


def _paths_module(tree: Path | None) -> types.ModuleType:
    """Return what the newest form imports as `nv_mlpinf.common.paths`."""
    module = types.ModuleType("nv_mlpinf.common.paths")
    scratch = Path(os.environ.get("MLPERF_SCRATCH_PATH") or "build")
    vars(module).update({name: scratch / folder for name, folder in _FOLDERS.items()})
    vars(module)["PROJECT_BASE_DIR"] = tree or Path()
    return module


def _modules(tree: Path | None) -> dict[str, types.ModuleType]:
    """Return NVIDIA's modules by name, with the packages that they are in."""
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
    return modules | {"configs.configuration": _older_module()}  # `configs` itself is the tree's


class _Place(NamedTuple):
    """What a file's path says of it."""

    tree: Path  # its top
    workload: str
    system: str
    scenario: str


def _place(path: str) -> _Place | None:
    """Return where in a tree a file lies; None for a file of its own."""
    file = Path(path).absolute()
    scenario, above, *rest = (folder.name for folder in (*file.parents, Path(), Path(), Path()))
    if file.stem in _NEWEST and rest[2] == "configs":
        system, benchmark = rest[:2]
        workload = next((name for name in WORKLOADS if _letters(name) == _letters(benchmark)), benchmark)
        return _Place(file.parents[5], workload, system, scenario)
    if rest[0] != "configs":
        return None
    workload, system = (above, _ANY_SYSTEM) if file.stem == _OLDER else (file.stem, above)
    return _Place(file.parents[3], workload, system, scenario)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@contextlib.contextmanager
def importable(path: str) -> Iterator[None]:
    """In the block the file's neighbours, NVIDIA's modules and its tree's other files are importable."""
    of_path(path)
    place = _place(path)
    neighbours, tree = Path(path).absolute().parent, place and place.tree
    folders = [str(folder) for folder in (neighbours, tree) if folder]
    given = _modules(tree)
    before, path_before = dict(sys.modules), [*sys.path]

    def is_the_files(name: str, module: Any) -> bool:
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        beside = top not in before and file is not None and neighbours in Path(file).parents[:2]
        return name in given or beside or (tree is not None and top == "configs")

    def forget() -> None:
        for name, module in list(sys.modules.items()):
            if is_the_files(name, module):
                del sys.modules[name]

    forget()
    sys.path[:0] = folders
    sys.modules.update(given)
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

    Workload, scenario and system are those of the file's path, if it is in a tree. Values for this kind of
    test are laid over the others.
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
            there = values.get(field)
            if isinstance(there, Mapping) and isinstance(value, Mapping):
                value = {**there, **value}
            values = {**values, field: value}
            lines.pop(field, None)
        flags, moved = AllFields.trtllm_runtime_flags, [*_OF_RUNTIME.values()]
        if stated := {field.name: values[field] for field in moved if field in values}:
            rest = {field: value for field, value in values.items() if field not in moved}
            values = rest | {flags: {**values.get(flags, {}), **stated}}
        items: dict[str, tuple[Any, str]] = {name: (value, path) for name, value in of_path(path).items()}
        items |= {name: (getattr(setting, name), f"{path}:{line}") for name in _SETTING}
        for field, value in values.items():
            if not isinstance(field, Field):
                raise ConfigError(f"{where}: the key {field!r}: expected a field")
            # made of another file's, or changed by a statement
            here = f"{path}:{lines[field]}" if field in lines else path
            value = str(value) if isinstance(value, Path) else value
            items[field.name] = (in_tree(field.name, in_our_unit(field.name, value, here), path), here)
        yield f"EXPORTS[{', '.join(str(getattr(setting, name).value) for name in _SETTING)}]", line, items


def _for(kind: KindOfTest, module: types.ModuleType, setting: Any) -> Mapping[Any, Any]:
    """Return a file's values for a kind of test: of the compliance test or, without any, of accuracy."""
    of_tests: Mapping[Any, Any] = getattr(module, "COMPLIANCE_OVERRIDES", None) or {}
    by_name = {getattr(test, "value", test): values for test, values in of_tests.items()}
    of_test: Mapping[Any, Any] = by_name.get(kind.compliance_test) or {}
    if setting not in of_test and kind.test_mode == "AccuracyOnly":
        of_test = getattr(module, "ACCURACY_OVERRIDES", None) or {}
    return dict(of_test.get(setting) or {})


_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")


def in_our_unit(name: str, value: Any, where: str) -> Any:
    """Return a value of a file in NVIDIA's form, where a bare number for a duration is in milliseconds."""
    if name not in _DURATIONS or isinstance(value, bool) or not _NUMBER.fullmatch(str(value).strip()):
        return value
    if 0 < float(str(value)) < 1000:
        raise ConfigError(
            f"{where}: {name} {value}: a bare number in such a file is milliseconds; write '{value}s' or"
            f" '{value}ms'"
        )
    return f"{value}ms"


def of_path(path: str) -> dict[str, str]:
    """Return the workload, scenario and system that a file's path in a tree names.

    Raises ConfigError for another workload, before the file, which may import modules of that workload, runs.
    """
    place = _place(path)
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
    """Return a path that is not here, but in the file's tree: as it is written, or below `src`.

    Submissions move `code`, or what is in it, to `src`.
    """
    if _BY_NAME.get(name) not in _PATHS or not isinstance(value, str) or _is_there(Path(value)):
        return value
    if (place := _place(path)) is None:
        return value
    inner = Path(*Path(value).parts[1:])
    places = (place.tree / value, place.tree / "src" / value, place.tree / "src" / inner)
    return next((str(there) for there in places if _is_there(there)), value)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long a name, say
        return False


def _assigned(text: str) -> dict[str, ast.expr]:
    """Return the assignments of a file to names, outside its classes and functions."""
    body = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return {target.id: node.value for node in body for target in node.targets if isinstance(target, ast.Name)}


def _lines(assigned: Mapping[str, ast.expr], node: ast.expr | None) -> dict[str, int]:
    """Return the lines of fields' names in a dictionary, and in those of this file that it is made of."""
    if isinstance(node, ast.Name):
        return _lines(assigned, assigned.get(node.id))
    found: dict[str, int] = {}
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            found |= _lines(assigned, value) if key is None else {_name(key): key.lineno}
    return found


def _name(key: ast.expr) -> str:
    return key.attr if isinstance(key, ast.Attribute) else key.id if isinstance(key, ast.Name) else ""
