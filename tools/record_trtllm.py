"""``python tools/record_trtllm.py --version V FOLDER``: TensorRT-LLM's interface, from the sources in FOLDER.

Prints JSON: names, parameters, enum members and command-line options, facts to test against where the library
can't be installed. Nothing of it is imported, and nothing but names is kept. A parameter is ``name``, or
``name=`` if it has a default; those after ``*`` are given by name, and ``**`` takes any. What is not in
FOLDER is not in the record: extracts of the files will do. tests/data/trtllm/README.md says what they were.
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
# What of the bindings is called, or filled in, by what runs here.
_CALLED = (
    "BatchingType", "CapacitySchedulerPolicy", "CommunicationMode", "CommunicationType",
    "ContextChunkingPolicy", "DynamicBatchConfig", "Executor", "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig", "FinishReason", "InflightBatchingStats", "IterationStats",
    "KvCacheConfig", "KvCacheStats", "ModelType", "MpiComm", "OrchestratorConfig", "OutputConfig",
    "ParallelConfig", "Request", "RequestType", "Response", "Result", "SamplingConfig",
    "SchedulerConfig", "StaticBatchingStats",
)  # fmt: skip
# What of the Python sources is called, or filled in, by what runs here.
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
    """Return the index behind the bracket that closes the one at `start`; ``->`` closes no angle."""
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
    """Yield the calls ``.name(arguments)`` from `at` on."""
    while match := _CALL.match(text, at):
        at = match.end()
        if text[at] == "<":
            at = _balanced(text, at)
        end = _balanced(text, at)
        yield match[1], text[at + 1 : end - 1]
        at = end


def _parameters(arguments: str) -> Parameters:
    found = [
        f"{name}{'=' if default or default_v else ''}" if name else "*"
        for name, default_v, default, _ in _ARGUMENT.findall(arguments)
    ]
    if not found and (lambda_ := re.search(r"\[\]\s*\(([^()]+)\)", arguments)):  # without names: by position
        found = [f"_{index}" for index, part in enumerate(lambda_[1].split(",")) if "& self" not in part]
    return found


def bindings(text: str) -> dict[str, dict[str, Any]]:
    """Classes and enums that a C++ file declares, by their Python name."""
    text = _COMMENT.sub("", text)
    found: dict[str, dict[str, Any]] = {}
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
            values = [re.search(r'"(\w+)"', rest) for call, rest in calls if call == "value"]
            found[name[1]] = {"members": [value[1] for value in values if value]}
        else:
            found[name[1]] = _class(calls)
    return found


def _class(calls: list[tuple[str, str]]) -> dict[str, Any]:
    made: dict[str, Any] = {"init": [], "methods": {}, "attributes": []}
    for call, arguments in calls:
        named = re.match(r'\s*"(\w+)"', arguments)
        name = named[1] if named else ""
        if call in ("def", "def_static") and (
            name == "__init__" or re.match(r"\s*(py|pybind11|nb|nanobind)::init\b", arguments)
        ):
            made["init"].append(_parameters(arguments))
        elif call in ("def", "def_static") and name and not name.startswith("__"):
            made["methods"].setdefault(name, []).append(_parameters(arguments))
        elif name and call.startswith(("def_r", "def_prop")):
            made["attributes"].append(name)
    return made


# --- Python ---


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    arguments = function.args
    ordered = [*arguments.posonlyargs, *arguments.args]
    first_default = len(ordered) - len(arguments.defaults)
    found = [
        f"{one.arg}{'=' if index >= first_default else ''}"
        for index, one in enumerate(ordered)
        if one.arg not in ("self", "cls")
    ]
    if arguments.kwonlyargs:
        found.append("*")
        found += [
            f"{one.arg}{'=' if default else ''}"
            for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
    return [*found, *(["**"] if arguments.kwarg else [])]


def python(text: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Functions and classes of a file: parameters, and a class's annotated names, the fields of a model."""
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            found[node.name] = {"parameters": _signature(node)}
        elif isinstance(node, ast.ClassDef) and node.name in wanted:
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
            found[node.name] = {
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
    return found


def _field(part: ast.stmt) -> Iterator[str]:
    if (
        isinstance(part, ast.AnnAssign)
        and isinstance(part.target, ast.Name)
        and not part.target.id.startswith("_")
    ):
        yield f"{part.target.id}{'=' if part.value else ''}"


def options(text: str) -> list[str]:
    """Return the options that a program adds to its argparse parser, and those it lists for its plugins."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            found += [
                str(one.value)
                for one in node.args
                if isinstance(one, ast.Constant) and str(one.value).startswith("--")
            ]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "cli_plugin_args":
            found += [f"--{name}" for name in ast.literal_eval(node.value)]
    return sorted(dict.fromkeys(found))


def commands(text: str) -> dict[str, list[str]]:
    """Return the options of each command of a program that is written with click."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(text)):
        marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        calls = [(ast.unparse(mark.func), mark.args) for mark in marks if isinstance(mark, ast.Call)]
        said = {
            kind: [
                str(one.value)
                for name, args in calls
                if name == f"click.{kind}"
                for one in args
                if isinstance(one, ast.Constant)
            ]
            for kind in ("command", "option")
        }
        if said["command"]:
            found[said["command"][0]] = sorted(word for word in said["option"] if word.startswith("-"))
    return found


def record(folder: Path, version: str) -> dict[str, Any]:
    """Everything of one version."""
    made: dict[str, Any] = {"version": version, "files": [], "bindings": {}, "python": {}, "tools": {}}

    def read(name: str) -> str:
        made["files"].append(name)
        return (folder / name).read_text(encoding="utf-8")

    for root in _BINDINGS:
        for path in sorted((folder / root).rglob("*.cpp")):
            if path.parent.name == "executor" or path.name == "bindings.cpp":
                found = bindings(read(path.relative_to(folder).as_posix()))
                made["bindings"] |= {name: spec for name, spec in found.items() if name in _CALLED}
    for name, wanted in _PYTHON.items():
        if (folder / name).is_file():
            made["python"] |= python(read(name), wanted)
    for tool, names in _TOOLS.items():
        if there := [name for name in names if (folder / name).is_file()]:
            made["tools"][tool] = sorted(option for name in there for option in options(read(name)))
    if (folder / _SERVE).is_file():
        for command, about in yaml.safe_load(read(_SERVE))["commands"].items():
            made["tools"][f"trtllm-serve {command}"] = sorted(
                flag for option in about["options"].values() for flag in option["flags"]
            )
    elif (folder / _SERVE_COMMANDS).is_file():
        made["tools"] |= {
            f"trtllm-serve {name}": flags for name, flags in commands(read(_SERVE_COMMANDS)).items()
        }
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", required=True)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    text = json.dumps(record(given.folder, given.version), indent=1, sort_keys=True)
    print(
        re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: "[" + re.sub(r"\s*\n\s*", " ", found[1]) + "]", text)
    )
