"""Cores by name, and what their classes declare."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm import core_names
from mpillm.core_names import BUILT_IN, DEFAULT, load_object
from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import (
    FindsServers,
    NamesFrameworks,
    RecordsSteps,
    ReportsCompilations,
    TransfersKv,
    TransfersKvToRuns,
)
from mpillm.cores.dummy import DummyCore
from mpillm.cores.registry import BackendRegistry

ROOT = Path(__file__).parents[3]
# Where PyTorch, or the core of that name, is the subject (doctor asks for its version, and measures NCCL with
# it; it is the name of vLLM's profiler); user_config and core_names have the names of all
# cores.
AT_HOME = re.compile(
    r"engine/|experiments/bench/|triton/peft_|(cores|stages)/torch_|core_names|doctor/gpu|programs/servers/vllm"
)


class Halfway(LLMCore):
    """Lacks what a test needs."""

    def load(self) -> None: ...


def test_only_a_cores_class_has_its_requirements() -> None:
    """A file that names a core would treat it differently from those of plug-ins."""
    files = [path for package in ("disagg", "launch", "mpillm") for path in (ROOT / package).rglob("*.py")]
    named = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if re.search(rf"\b{DEFAULT}\b", path.read_text(encoding="utf-8"))
    }
    assert [name for name in sorted(named) if not AT_HOME.match(name.removeprefix("mpillm/"))] == []


@pytest.mark.parametrize("name", [*BUILT_IN])
def test_what_classes_name_is_there(name: str) -> None:
    core = BackendRegistry.declared(name)
    for path in filter(None, (core.engine_stages, core.servers)):
        assert callable(load_object(path))
    assert (core.framework is None) == (not core.packages)


CAPABILITIES: dict[Any, set[str]] = {
    TransfersKv: {"dummy", DEFAULT},
    TransfersKvToRuns: {DEFAULT},
    RecordsSteps: {DEFAULT},
    ReportsCompilations: {DEFAULT},
    FindsServers: {"trtllm_endpoint", "trtllm_disagg", "triton_grpc"},
    NamesFrameworks: {"trtllm_endpoint", "trtllm_disagg", "triton_grpc"},
}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_the_built_in_cores_can_do(capability: Any) -> None:
    """Of those whose classes can be imported here."""
    able = {name for name in BUILT_IN if issubclass(BackendRegistry.declared(name), capability)}
    assert able == CAPABILITIES[capability]


def test_what_every_core_must_do() -> None:
    """The contract's file imports nothing of the engine but the configuration that all cores get."""
    assert sorted(LLMCore.__abstractmethods__) == [
        *("credits", "enqueue", "has_work", "load", "poll_responses", "run_health_check"),
    ]
    texts = [
        (ROOT / f"mpillm/cores/{file}.py").read_text(encoding="utf-8") for file in ("base", "capabilities")
    ]
    named = re.findall(r"mpillm\.engine[\w.]*", "".join(texts))
    assert named == ["mpillm.engine.shape.engine_config"]


def test_registration() -> None:
    BackendRegistry.register("mine", "mpillm.cores.dummy:DummyCore")
    try:
        assert BackendRegistry.get("mine") is BackendRegistry.get("dummy") is DummyCore
        assert "mine" in BackendRegistry.names()
    finally:
        del core_names.registered["mine"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dumy", "--core_type dumy: no such core (did you mean 'dummy'?); there are: dummy, torch"),
        ("nowhere:Core", "--core_type nowhere:Core needs the package 'nowhere'"),
        ("mpillm.cores.dummy:Dummy", "has no attribute 'Dummy'"),
        (".dummy:DummyCore", "expected the name of a core, or package.module:Class"),
        (":", "expected the name of a core"),
        ("math:pi", "--core_type math:pi: math:pi is not an LLMCore"),
        ("math:", "--core_type math:: expected the name of a core, or package.module:Class"),
        (
            f"{__name__}:Halfway",
            "the class lacks credits, enqueue, has_work, poll_responses, run_health_check",
        ),
    ],
)
def test_no_such_core(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        BackendRegistry.get(name)
    assert message in str(error.value)


@pytest.mark.parametrize(("name", "package"), [("triton_grpc", "grpc"), ("torch", "torch")])
def test_a_missing_package_is_named_with_an_extra_that_exists(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(module: str) -> None:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    monkeypatch.setattr("mpillm.cores.registry.importlib.import_module", import_module)
    with pytest.raises(ConfigError) as error:
        BackendRegistry.get(name)
    (extra,) = re.findall(rf"needs the package '{package}': pip install 'mpillm\[(\w+)\]'", str(error.value))
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
