"""--help of every command: it has the options that the command reads, the defaults that it has, and the names
to choose from."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from mpillm import __version__
from mpillm.cli import main, module_of
from mpillm.core_names import BUILT_IN
from mpillm.cores.registry import BackendRegistry
from mpillm.nvidia.config_file import KEYS
from mpillm.options.command_line import Parser
from mpillm.options.fields import BY_NAME, FIELDS, SETS, AllFields
from mpillm.options.fields.runtime_flags import BUILD_OPTIONS, RUNTIME_FLAGS, RUNTIME_OPTIONS
from mpillm.options.options import parse

ROOT = Path(__file__).parents[3]
# The commands whose options are all fields, of which each shows those of its stages. The others take no
# option that they don't show.
SHARED = (
    "run",
    "serve",
    "run-harness",
    "plan",
    "generate-engines",
    "generate-triton-config",
    "generate-disagg-config",
    "run-llm-server",
)
EXEMPT = {
    "run": {"dry_run", "world_size"}  # read to be refused
    | {
        field.name for field in FIELDS if field.group == "serve"
    },  # of its endpoint for another harness, which sets them
    # read of the CoreConfig that calibration makes, and of a run, whose conversations are streamed
    "generate-engines": {"kv_cache_dtype", "harness"},
    "generate-triton-config": {"harness"},
    "generate-disagg-config": {"harness"},
    # It shares the modules of `run`, which read them of a test.
    "serve": {
        field.name
        for field in FIELDS
        if field.group in ("data", "test", "output", "server", "other harness", "conversations")
    }
    | {"dry_run", "world_size"},
    # read of the CoreConfig whose memory is looked at, and of the run that a plan is for, to be refused
    "plan": {
        *(
            "beam_width",
            "drain_deadline",
            "end_ids",
            "endpoint_type",
            "max_output_len",
            "on_instance_loss",
            "seed",
            "stall_timeout",
            "stop_words",
        ),
        "test_deadline",
    }
    | {
        field.name
        for field in FIELDS
        if field.group in ("data", "test", "output", "other harness", "conversations")
    },
    # It asks a core whether it has `engine_stages`, and does not call them.
    "run-llm-server": {"build_deadline", "dtype", "harness", "port", "quantization"},
}
# How a configuration is called where its values are read: what else has an attribute of a field's name is no
# reading of the field.
CONFIGURATIONS = ("config", "configs", "harness")
# These find values for any command: what they read is in `SETS`.
MECHANISM = (
    "mpillm.fields",
    "mpillm.configurator",
    "mpillm.options.command_line",
    "mpillm.options.config_file",
    "mpillm.workloads",
    "mpillm.options.flags",
    "mpillm.options.rules",
)
TRAITS = ("engine_stages", "servers")  # of cores' classes: functions that commands call
MECHANISM_FUNCTIONS = ("parse", "parse_each", "collect", "main", "run_name")


@cache
def modules() -> dict[str, ast.Module]:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "mpillm").rglob("*.py")
    }
    return {
        name.removesuffix(".__init__"): ast.parse(path.read_text(encoding="utf-8"))
        for name, path in files.items()
    }


def imported(name: str) -> set[str]:
    """Return our modules that a module may load, itself included, without the configurator's."""
    found: set[str] = set()
    text = ast.unparse(modules()[name])
    waiting = [
        name,
        *(path.partition(":")[0] for trait in TRAITS if f".{trait}" in text for path in declared(trait)),
    ]
    while waiting:
        module = waiting.pop()
        if module in found or module not in modules() or module.startswith(MECHANISM):
            continue
        found.add(module)
        for node in ast.walk(modules()[module]):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


class Definition(NamedTuple):
    """Holds a function, class, method or constant, and the name of the class that it is in or is."""

    node: ast.AST
    owner: str


class Bound(NamedTuple):
    """Holds a class whose parameters are fields: the field of each parameter, and its bases."""

    fields: dict[str, str]
    bases: list[str]


def definitions(names: set[str]) -> dict[str, list[Definition]]:
    """Return the definitions of these modules, by name."""
    found: dict[str, list[Definition]] = defaultdict(list)

    def add(node: ast.AST, owner: str) -> None:
        if isinstance(node, ast.FunctionDef):
            found[node.name].append(Definition(node, owner))
        elif isinstance(node, ast.ClassDef):
            found[node.name].append(Definition(node, node.name))
            for inner in node.body:
                add(inner, node.name)
        for target in (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        ):
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    found[name.id].append(Definition(node, owner))

    for module in names:
        for node in modules()[module].body:
            add(node, "")
    return found


def bound_classes(known: dict[str, list[Definition]]) -> dict[str, Bound]:
    found: dict[str, Bound] = {}
    for node, name in [definition for definitions in known.values() for definition in definitions]:
        if isinstance(node, ast.ClassDef):
            binds = [
                call.args
                for call in node.decorator_list
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "bind"
            ]
            fields = [(ast.unparse(args[0]).removeprefix("AllFields."), args) for args in binds]
            parameters = {
                ast.literal_eval(args[1]) if len(args) > 1 else field: field for field, args in fields
            }
            found[name] = Bound(parameters, [ast.unparse(base) for base in node.bases])
    return found


def field_of(parameter: str, cls: str, bound: dict[str, Bound]) -> str | None:
    """Return the field that a class's parameter is bound to, there or in a base."""
    if cls not in bound:
        return None
    return bound[cls].fields.get(parameter) or next(
        filter(None, (field_of(parameter, base, bound) for base in bound[cls].bases)), None
    )


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield everything in a definition except a class's methods, which callers name.

    Special methods are included, because they are called unnamed.
    """
    yield node
    for child in ast.iter_child_nodes(node):
        if not (
            isinstance(node, ast.ClassDef)
            and isinstance(child, ast.FunctionDef)
            and not child.name.startswith("__")
        ):
            yield from parts(child)


def fields_read(command: str) -> set[str]:
    """Return the fields that a command's code reads, found from its function on by the names that it
    mentions. It may read fewer, not more. A method is followed if its name and its class, or a class that
    inherits from it, are mentioned on the way."""
    module = module_of(command)
    known = definitions(imported(module))
    bound = bound_classes(known)
    reached = {
        id(node): Definition(node, "")
        for node in modules()[module].body
        if getattr(node, "name", "") == "main"
    }
    waiting = list(reached.values())
    names: set[str] = set()
    while waiting:
        names |= {name for one in waiting for name in mentioned(one.node)}
        waiting = [
            one
            for name in names - {*MECHANISM_FUNCTIONS}
            for one in known.get(name, [])
            if id(one.node) not in reached and (one.owner in ("", name) or one.owner in names)
        ]
        reached |= {id(one.node): one for one in waiting}
    read = {name for node, owner in reached.values() for name in read_in(node, owner, bound, names)}
    return {BY_NAME[name].name for name in read}


def mentioned(definition: ast.AST) -> set[str]:
    nodes = list(parts(definition))
    names = {n.id for n in nodes if isinstance(n, ast.Name)} | {
        n.attr for n in nodes if isinstance(n, ast.Attribute)
    }
    return names | {path.partition(":")[2] for trait in TRAITS if trait in names for path in declared(trait)}


@cache
def declared(trait: str) -> set[str]:
    """Return the functions that the classes of cores name, as ``module:function``."""
    return {path for name in BUILT_IN if (path := getattr(BackendRegistry.declared(name), trait))}


def read_in(definition: ast.AST, owner: str, bound: dict[str, Bound], names: set[str]) -> Iterator[str]:
    """Yield the fields that one definition reads; `names`: the classes that may be there."""
    by_name = any(f"getattr({word}, " in ast.unparse(definition) for word in CONFIGURATIONS)
    for node in parts(definition):
        if by_name and isinstance(node, ast.Constant) and node.value in BY_NAME:
            yield str(node.value)
        if not isinstance(node, ast.Attribute):
            continue
        of = ast.unparse(node.value).rpartition(".")[2].lstrip("_").partition("[")[0]
        if of in CONFIGURATIONS and node.attr in BY_NAME:
            yield node.attr
        classes = [owner] if of == "self" else names & bound.keys() if of in CONFIGURATIONS else ()
        yield from filter(None, (field_of(node.attr, cls, bound) for cls in classes))


@cache
def help_of(command: str) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setenv("COLUMNS", "140")
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help", "all"])
    assert stopped.value.code == 0
    return text.getvalue()


def options_in_help(command: str) -> set[str]:
    return {
        BY_NAME[name].name
        for name in re.findall(r"^  (?:-\w[, ].*)?--(\w+)", help_of(command), re.MULTILINE)
        if name in BY_NAME
    }


@pytest.mark.long
@pytest.mark.parametrize("command", SHARED)
def test_what_a_command_reads_is_in_its_help(command: str) -> None:
    read = fields_read(command)
    assert len(read) > 8, "or the search finds nothing"
    assert read - options_in_help(command) - EXEMPT.get(command, set()) == set()


@pytest.mark.parametrize("command", SHARED)
def test_what_sets_an_option_of_a_command_is_in_its_help(command: str) -> None:
    """Options that set an option are in the help: gpu_batch_size sets max_batch_size, flags have keys that
    are options."""
    there = options_in_help(command)
    assert {
        field.name for field, others in SETS.items() if there & {other.name for other in others}
    } - there == set()
    if "config_file" in there:
        assert {key.name for key in KEYS} <= there, "what a file's configurations are told apart by"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpu_batch_size=3"], {"max_batch_size": 3}),
        (["--trtllm_runtime_flags=max_num_tokens:7,ctx_tp_size:2"], {"max_num_tokens": 7, "ctx_tp_size": 2}),
        (["--trtllm_build_flags=tensor_parallelism:2"], {"tensor_parallelism": 2}),
        (["--use_triton"], {"harness_type": "triton", "core_type": "triton_grpc"}),
        (["--core_type=trtllm_disagg"], {"mode": "disaggregated"}),
    ],
)
def test_these_options_set_others(options: list[str], expected: dict[str, object]) -> None:
    setting = BY_NAME[options[0].partition("=")[0][2:]]
    config = parse(options, Parser(prog="mpillm x"), FIELDS)
    found = {name: getattr(config, name) for name in expected}
    assert found == expected
    reached = {setting}
    while further := {field for known in reached for field in SETS.get(known, ())} - reached:
        reached |= further
    assert set(expected) <= {field.name for field in reached}


def test_flags_that_are_options_are_in_the_table() -> None:
    for field, keys in (
        (AllFields.trtllm_runtime_flags, {**RUNTIME_FLAGS, **RUNTIME_OPTIONS}),
        (AllFields.trtllm_build_flags, BUILD_OPTIONS),
    ):
        assert set(SETS[field]) == {option for option in keys.values() if option in FIELDS}


def entry(command: str, option: str) -> str:
    """Return the help of an option, on one line."""
    (found,) = re.findall(rf"^  --{option}\b.*\n(?:^ {{20}}.*\n)*", help_of(command), re.MULTILINE)
    return " ".join(found.split())


def test_the_names_of_cores() -> None:
    for name in BUILT_IN:
        assert re.search(rf"\b{name}\b", entry("run", "core_type"))


@pytest.mark.parametrize("option", ["triton_num_servers", "triton_num_models_per_server"])
def test_a_default_that_follows_the_gpus_is_no_number(option: str) -> None:
    for command in ("generate-triton-config", "run-llm-server"):
        assert re.search(r"\[default: [^]]*GPUs", entry(command, option))


def test_defaults_are_those_of_the_command() -> None:
    assert entry("generate-triton-config", "harness_type").endswith("[default: triton]")
    assert entry("generate-triton-config", "core_type").endswith("[default: triton_grpc]")
    assert entry("run", "harness_type").endswith("[default: custom]")


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 0
    assert capsys.readouterr().out == f"mpillm {__version__}\n"
