"""``python tools/record_trtllm.py --version V FOLDER``: record TensorRT-LLM's interface.

Reads its sources in FOLDER. Prints JSON with names, parameters, enum members and command-line options, for
tests without the library. It imports nothing from FOLDER, and only records names. A parameter is ``name``, or
``name=`` with a default. Parameters after ``*`` are keyword-only; ``**`` accepts any. FOLDER may contain a
part of the sources (tests/data/trtllm/README.md).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Parameters = list[str]

_BINDINGS = ("cpp/tensorrt_llm/nanobind", "cpp/tensorrt_llm/pybind")
# Classes of the bindings that mpillm uses.
_CALLED = (
    "BatchingType", "CapacitySchedulerPolicy", "CommunicationMode", "CommunicationType",
    "ContextChunkingPolicy", "DynamicBatchConfig", "Executor", "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig", "FinishReason", "InflightBatchingStats", "IterationStats",
    "KvCacheConfig", "KvCacheStats", "ModelType", "MpiComm", "OrchestratorConfig", "OutputConfig",
    "ParallelConfig", "Request", "RequestType", "Response", "Result", "SamplingConfig",
    "SchedulerConfig", "StaticBatchingStats",
)  # fmt: skip
# Classes and functions of the Python sources that mpillm uses.
_PYTHON = {
    "tensorrt_llm/llmapi/llm.py": ("BaseLLM",),
    "tensorrt_llm/llmapi/llm_args.py": (
        "BaseLlmArgs", "TorchLlmArgs", "TrtLlmArgs", "KvCacheConfig", "SchedulerConfig", "CudaGraphConfig",
        "ExtendedRuntimePerfKnobConfig", "CacheTransceiverConfig",
    ),
    "tensorrt_llm/llmapi/mpi_session.py": ("MpiCommSession",),
    "tensorrt_llm/sampling_params.py": ("SamplingParams",),
    "tensorrt_llm/executor/result.py": ("GenerationResult", "CompletionOutput"),
    "tensorrt_llm/_utils.py": ("set_mpi_comm",),
    "tensorrt_llm/llmapi/disagg_utils.py": ("extract_disagg_cfg", "extract_ctx_gen_cfgs"),
}  # fmt: skip
_TOOLS = {
    "trtllm-build": ("tensorrt_llm/commands/build.py", "tensorrt_llm/plugin/plugin.py"),
    "quantize.py": ("examples/quantization/quantize.py",),
    "convert_checkpoint.py": (
        "examples/models/core/llama/convert_checkpoint.py",
        "examples/llama/convert_checkpoint.py",
    ),
}
_SERVE = "tests/unittest/api_stability/references/trtllm_serve_cli.yaml"
_SERVE_COMMANDS = "tensorrt_llm/commands/serve.py"  # of releases without that file


# --- bindings: pybind11's and nanobind's `class_`, `enum_` and their chains of `.def` ---

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DECLARED = re.compile(r"(?:py|pybind11|nb|nanobind)::(class_|classh|enum_)\s*<")
_ARGUMENT = re.compile(
    r'(?:py|pybind11|nb)::(?:arg(?:_v)?\("(\w+)"(?:(,)|\)(?:\.\w+\([^()]*\))*\s*(=(?!=))?)|(kw_only)\(\))'
)
_CALL = re.compile(r"\s*\.\s*(\w+)\s*(?=[<(])")
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


def _balanced(text: str, start: int) -> int:
    """Return the index after the bracket that closes the bracket at `start`; ``->`` does not close ``<``."""
    opening, closing, depth = text[start], _CLOSING[text[start]], 0
    for index in range(start, len(text)):
        if text[index] == opening:
            depth += 1
        elif text[index] == closing and not (closing == ">" and text[index - 1] == "-"):
            depth -= 1
            if depth == 0:
                return index + 1
    raise SystemExit(f"no {closing} for the {opening} of: {text[start : start + 60]}")


def _chain(text: str, at: int) -> Iterator[tuple[str, str]]:
    """Yield the calls ``.name(arguments)`` that start at `at`."""
    while match := _CALL.match(text, at):
        at = match.end()
        if text[at] == "<":
            at = _balanced(text, at)
        end = _balanced(text, at)
        yield match[1], text[at + 1 : end - 1]
        at = end


def _parameters(arguments: str) -> Parameters:
    parameters = [
        f"{name}{'=' if default or default_v else ''}" if name else "*"
        for name, default_v, default, _ in _ARGUMENT.findall(arguments)
    ]
    if not parameters and (lambda_ := re.search(r"\[\]\s*\(([^()]+)\)", arguments)):  # positional, unnamed
        parts = lambda_[1].split(",")
        parameters = [f"_{index}" for index, part in enumerate(parts) if "& self" not in part]
    return parameters


def bindings(text: str) -> dict[str, dict[str, Any]]:
    """Return the classes and enums that a C++ file declares, by Python name."""
    text = _COMMENT.sub("", text)
    declared: dict[str, dict[str, Any]] = {}
    for match in _DECLARED.finditer(text):
        at = _balanced(text, match.end() - 1)
        variable = re.compile(r"\s*(\w*)\s*").match(text, at)
        assert variable
        at = variable.end()
        if text[at : at + 1] != "(" or not (name := re.search(r'"(\w+)"', text[at : _balanced(text, at)])):
            continue
        calls = list(_chain(text, _balanced(text, at)))
        if variable[1]:  # `py::class_<…> request(m, "Request"); request.def(…)…;`
            for later in re.finditer(rf"(?<![\w.]){variable[1]}(?=\s*\.\s*def)", text):
                calls += _chain(text, later.end())
        if match[1] == "enum_":
            values = [re.search(r'"(\w+)"', arguments) for call, arguments in calls if call == "value"]
            declared[name[1]] = {"members": [value[1] for value in values if value]}
        else:
            declared[name[1]] = _class(calls)
    return declared


def _class(calls: list[tuple[str, str]]) -> dict[str, Any]:
    record: dict[str, Any] = {"init": [], "methods": {}, "attributes": []}
    for call, arguments in calls:
        named = re.match(r'\s*"(\w+)"', arguments)
        name = named[1] if named else ""
        if call in ("def", "def_static") and (
            name == "__init__" or re.match(r"\s*(py|pybind11|nb|nanobind)::init\b", arguments)
        ):
            record["init"].append(_parameters(arguments))
        elif call in ("def", "def_static") and name and not name.startswith("__"):
            record["methods"].setdefault(name, []).append(_parameters(arguments))
        elif name and call.startswith(("def_r", "def_prop")):
            record["attributes"].append(name)
    return record


# --- Python ---


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    arguments = function.args
    ordered = [*arguments.posonlyargs, *arguments.args]
    first_default = len(ordered) - len(arguments.defaults)
    parameters = [
        f"{one.arg}{'=' if index >= first_default else ''}"
        for index, one in enumerate(ordered)
        if one.arg not in ("self", "cls")
    ]
    if arguments.kwonlyargs:
        parameters.append("*")
        parameters += [
            f"{one.arg}{'=' if default else ''}"
            for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
    return [*parameters, *(["**"] if arguments.kwarg else [])]


def python(text: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return functions and classes of a file: parameters, and the annotated names (fields) of a class."""
    declared: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            declared[node.name] = {"parameters": _signature(node)}
        elif isinstance(node, ast.ClassDef) and node.name in names:
            methods = [
                part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            public = {
                method.name: _signature(method)
                for method in methods
                if (not method.name.startswith("_") or method.name == "__init__")
                and not any("validator" in ast.unparse(mark) for mark in method.decorator_list)
            }
            properties = [
                method.name
                for method in methods
                if any(ast.unparse(mark) == "property" for mark in method.decorator_list)
            ]
            declared[node.name] = {
                "bases": [ast.unparse(base) for base in node.bases],
                "fields": [field for part in node.body for field in _field(part)],
                "methods": {
                    name: parameters for name, parameters in public.items() if name not in properties
                },
                "attributes": [name for name in properties if not name.startswith("_")],
                "awaits": [
                    method.name
                    for method in methods
                    if method.name in ("__aiter__", "__anext__", "__await__")
                ],
            }
    return declared


def _field(part: ast.stmt) -> Iterator[str]:
    if (
        isinstance(part, ast.AnnAssign)
        and isinstance(part.target, ast.Name)
        and not part.target.id.startswith("_")
    ):
        yield f"{part.target.id}{'=' if part.value else ''}"


def options(text: str) -> list[str]:
    """Return the options of a program's argparse parser and of its plugins."""
    flags: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            flags += [
                str(one.value)
                for one in node.args
                if isinstance(one, ast.Constant) and str(one.value).startswith("--")
            ]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "cli_plugin_args":
            flags += [f"--{name}" for name in ast.literal_eval(node.value)]
    return sorted(dict.fromkeys(flags))


def commands(text: str) -> dict[str, list[str]]:
    """Return the options of each command of a click program."""
    flags: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(text)):
        marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        calls = [(ast.unparse(mark.func), mark.args) for mark in marks if isinstance(mark, ast.Call)]
        names = {
            kind: [
                str(one.value)
                for name, args in calls
                if name == f"click.{kind}"
                for one in args
                if isinstance(one, ast.Constant)
            ]
            for kind in ("command", "option")
        }
        if names["command"]:
            flags[names["command"][0]] = sorted(name for name in names["option"] if name.startswith("-"))
    return flags


def make_record(folder: Path, version: str) -> dict[str, Any]:
    """Return the record of one version."""
    record: dict[str, Any] = {"version": version, "files": [], "bindings": {}, "python": {}, "tools": {}}

    def read(name: str) -> str:
        record["files"].append(name)
        return (folder / name).read_text(encoding="utf-8")

    for root in _BINDINGS:
        for path in sorted((folder / root).rglob("*.cpp")):
            if path.parent.name == "executor" or path.name == "bindings.cpp":
                declared = bindings(read(path.relative_to(folder).as_posix()))
                record["bindings"] |= {name: spec for name, spec in declared.items() if name in _CALLED}
    for name, used in _PYTHON.items():
        if (folder / name).is_file():
            record["python"] |= python(read(name), used)
    for tool, names in _TOOLS.items():
        if files := [name for name in names if (folder / name).is_file()]:
            record["tools"][tool] = sorted(option for name in files for option in options(read(name)))
    if (folder / _SERVE).is_file():
        for command, about in yaml.safe_load(read(_SERVE))["commands"].items():
            record["tools"][f"trtllm-serve {command}"] = sorted(
                flag for option in about["options"].values() for flag in option["flags"]
            )
    elif (folder / _SERVE_COMMANDS).is_file():
        record["tools"] |= {
            f"trtllm-serve {name}": flags for name, flags in commands(read(_SERVE_COMMANDS)).items()
        }
    return record


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", required=True)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    text = json.dumps(make_record(args.folder, args.version), indent=1, sort_keys=True)
    print(
        re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda match: "[" + re.sub(r"\s*\n\s*", " ", match[1]) + "]", text)
    )
