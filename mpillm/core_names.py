"""The names of cores, servers and more, with their paths ``module:Name``, without imports."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

from disagg.errors import nearest

ENTRY_POINTS = "mpillm.cores"
"""The group of entry points by which an installed package adds cores: ``name = "package.module:Class"``."""

PLUGIN_PACKAGES = (
    "mpillm.experiments",
    "mpillm.nvidia",
    "mpillm.stages",
    "mpillm.submission",
    "mpillm.triton",
    "mpillm.trtllm",
)
"""Packages that provide cores, commands and more by name. Only this line names them."""

DEFAULT = "torch"


def load_object(path: str) -> Any:
    """Import and return the object at the path ``module:Name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def provided_by(package: str, kind: str) -> dict[str, str]:
    """Return a plugin package's table of a kind, such as CORES; the package imports nothing."""
    names: dict[str, str] = getattr(importlib.import_module(package), kind, {})
    return names


def provided(kind: str) -> dict[str, str]:
    """Return the tables of a kind from all plugin packages together."""
    return {name: value for package in PLUGIN_PACKAGES for name, value in provided_by(package, kind).items()}


def package_of(kind: str, name: str, core: str) -> str:
    """Return the plugin package that provides `name`; otherwise `core`, a main package."""
    return next((package for package in PLUGIN_PACKAGES if name in provided_by(package, kind)), core)


def module_of(command: str) -> str:
    """Return the module whose `main` gets the command's arguments and returns its exit code."""
    return f"{package_of('COMMANDS', command, 'mpillm')}.commands.{command.replace('-', '_')}"


BUILT_IN = {
    DEFAULT: "mpillm.cores.torch_core:TorchCore",
    "dummy": "mpillm.cores.dummy:DummyCore",
    **provided("CORES"),
}

DISAGGREGATED = (DEFAULT, "trtllm_disagg")
"""Cores whose `run-llm-server` starts the servers of a disaggregation YAML."""

EXTRAS = {DEFAULT: "torch", **provided("EXTRAS")}
"""The extra of this package that a core's class needs, if any."""

BROUGHT_BY = {
    **dict.fromkeys(("torch", "safetensors"), "torch"),
    **dict.fromkeys(("tokenizers", "jinja2"), "tokenizer"),
    "gguf": "models",
    "argcomplete": "completion",
    "pandas": "datasets",
    **dict.fromkeys(("rouge_score", "nltk"), "accuracy"),
    "tritonclient": "triton",
    **dict.fromkeys(("aiohttp", "uvloop"), "http"),
}
"""The extra that brings each package which a plain installation lacks."""


NEEDED = ("mlperf_loadgen", "mpi4py", "numpy", "psutil", "yaml")
"""The packages that every installation has."""


def lacks(package: str) -> str:
    """Return the message for a missing package; "" if it is not mpillm's."""
    if package in NEEDED:
        return (
            f"the package '{package}' is missing: mpillm is not installed for {sys.executable}"
            " (after `make install` it is for .venv/bin/python)"
        )
    if package not in BROUGHT_BY:
        return ""
    return f"the package '{package}' is missing: pip install 'mpillm[{BROUGHT_BY[package]}]'"


TRTLLM = ("triton_grpc", "trtllm_disagg", "trtllm_endpoint", "trtllm_executor", "trtllm_hlapi")
"""Cores with TensorRT-LLM behind them: its flags vary with the model, and are passed on unchanged."""

ENDPOINT_CORE = "trtllm_endpoint"
OTHER_NAMES = {"openai": ENDPOINT_CORE}
"""Cores by other names that --core_type may give them."""

# Names of cores with their backends, unless it is the usual one, for the effects of options.
DUMMY = ("dummy",)
TRTLLM_EXECUTOR = ("trtllm_executor",)
TRTLLM_HLAPI = ("trtllm_hlapi", "trtllm_hlapi cpp")
TRTLLM_ENDPOINT = ("trtllm_endpoint", "trtllm_endpoint cpp")
TRTLLM_DISAGG = ("trtllm_disagg", "trtllm_disagg cpp")
TRITON = ("triton_grpc", "triton_grpc python")
TRITON_URL = "localhost:8001"
"""The default URL of a tritonserver."""
EMBEDDED = (DEFAULT, "triton_grpc python")
"""Where mpillm's own engine computes: in the ranks, or behind Triton."""
RUNS_ENGINES = (
    "trtllm_executor",
    "triton_grpc",
    "trtllm_hlapi cpp",
    "trtllm_endpoint cpp",
    "trtllm_disagg cpp",
)
"""Where an engine of `trtllm-build` computes."""
WITH_BACKENDS = tuple(dict.fromkeys((*BUILT_IN, *TRTLLM_HLAPI, *TRTLLM_ENDPOINT, *TRTLLM_DISAGG, *TRITON)))
"""All built-in cores, each with each of its backends."""

registered: dict[str, str] = {}
"""Cores that this process has registered."""


def _installed(**about: Any) -> Any:
    from importlib.metadata import entry_points  # 20 ms, which a rank with a built-in core saves

    return entry_points(group=ENTRY_POINTS, **about)


def names() -> list[str]:
    """Return the names of all cores that can run a test."""
    return sorted({*BUILT_IN, *registered, *(point.name for point in _installed())})


def with_backend(name: str, runtime_flags: Mapping[str, Any]) -> str:
    """Return a core's name, with the backend that its runtime flags choose if that is not the usual one."""
    backend = runtime_flags.get("triton_backend" if name == "triton_grpc" else "trtllm_backend")
    named = f"{name} {backend}"
    return named if named in WITH_BACKENDS else name


def class_path(name: str) -> str | None:
    """Return the ``module:Class`` of a core, or None; a `name` with a colon is returned as it is."""
    if ":" in name:
        return name
    if path := registered.get(name) or BUILT_IN.get(name):
        return path  # do not search installed packages, which takes longer
    return next((point.value for point in _installed(name=name)), None)


K = TypeVar("K")
OTHER = "command:"


class NamedKinds(Generic[K]):
    """Kinds of programs by name, each in its own file, and ``command:WORDS`` for any other.

    A kind's file is imported on use: every command needs the names.
    """

    def __init__(self, built_in: Mapping[str, str], of_command: str) -> None:
        """`built_in`: ``module:NAME`` by the name of the kind; `of_command`: for any other command."""
        self.built_in = built_in
        self._of_command = of_command

    def kind_of(self, text: str) -> K:
        """Return a kind. Raises ValueError if there is none."""
        if text.startswith(OTHER):
            make = load_object(self._of_command)
            return cast(K, make(shlex.split(text.removeprefix(OTHER))))
        if text not in self.built_in:
            raise ValueError(nearest(text, self.built_in).strip(" ()") or "there is no such kind")
        return cast(K, load_object(self.built_in[text]))
