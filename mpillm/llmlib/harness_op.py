"""`LLMHarnessOp`: a LoadGen test with a user's core, in one process or on all ranks of an mpirun."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from disagg.errors import ConfigError
from mpillm.commands.run import start
from mpillm.cores.registry import BackendRegistry
from mpillm.llmlib.command_line import command_line
from mpillm.llmlib.cores.base import LLMCore
from mpillm.llmlib.dataset import LLMDataLoader
from mpillm.llmlib.rank_core import RankCore
from mpillm.options.fields import AllFields
from mpillm.options.mitten import option_texts
from mpillm.workloads import Workload


class LLMHarnessOp:
    """Runs a test: `mpillm run` with the values of this call, the command line and the active configuration.

    The call overrides the command line, which overrides the configuration. A script with an operation starts
    directly or with mpirun. A process can run one test.
    """

    data_loader: ClassVar[type[LLMDataLoader] | None] = None  # None: the data set of the options
    own_core_type: ClassVar[str | None] = None  # default core of a subclass

    @classmethod
    def immediate_dependencies(cls) -> set[type]:
        """Return the operations whose outputs `run` receives."""
        return set()

    @classmethod
    def output_keys(cls) -> list[str]:
        """Return the keys of `run`'s result."""
        return ["log_dir", "result_metadata"]

    def __init__(
        self,
        *,
        workload: Workload | str | None = None,
        core_type: type[LLMCore] | str | None = None,
        **options: Any,
    ) -> None:
        """`options`: values of other fields, by name. Raises ConfigError for an unknown field."""
        if unused := [
            name for name in ("issue_queries", "flush_queries", "wrap_lg_test") if hasattr(self, name)
        ]:
            raise ConfigError(
                f"{type(self).__name__}.{unused[0]} would not be called:"
                " LoadGen's queries go through mpillm's harness"
            )
        self.wl = workload
        self.core_type = core_type or self.own_core_type
        self.options = options

    def get_backend_kwargs(self, dependency_outputs: Mapping[type, Any]) -> dict[str, Any]:
        """Return arguments for `get_num_cores_for_workload` and `get_config_for_core`, in addition to
        --core_options."""
        return {}

    def run(
        self, scratch_space: Any = None, dependency_outputs: Mapping[type, Any] | None = None
    ) -> dict[str, Any]:
        """Run the test; return the run directory, and on rank 0 the content of its result.json.

        Raises SystemExit with mpillm's exit code if the test fails.
        """
        argv = self.argv()
        (core_type,) = option_texts([AllFields.core_type], argv).values() or (AllFields.core_type.default,)
        with contextlib.suppress(ConfigError):  # the run reports it, once
            if issubclass(core := BackendRegistry.get(core_type), RankCore):
                core.backend_kwargs = self.get_backend_kwargs(dependency_outputs or {})
        code, log_dir = start(argv)
        if code:
            sys.exit(code)
        result = Path(log_dir) / "result.json"
        return {
            "log_dir": log_dir,
            "result_metadata": json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {},
        }

    def argv(self) -> list[str]:
        """Return the arguments of the run."""
        values: dict[str, Any] = dict(self.options)
        if self.wl is not None:
            values["benchmarks"] = self.wl if isinstance(self.wl, str) else self.wl.name
        if self.core_type is not None:
            values["core_type"] = (
                _path(self.core_type) if isinstance(self.core_type, type) else self.core_type
            )
        if self.data_loader is not None:
            values["dataset"] = _path(self.data_loader)
        return command_line(values)


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


class DummyHarnessOp(LLMHarnessOp):
    """A test of the core `dummy`."""

    own_core_type = "dummy"


class TrtllmExecutorClientHarnessOp(LLMHarnessOp):
    """A test of TensorRT-LLM's executor."""

    own_core_type = "trtllm_executor"


class TrtllmHLApiClientHarnessOp(LLMHarnessOp):
    """A test of TensorRT-LLM's LLM class."""

    own_core_type = "trtllm_hlapi"


class TrtllmServeClientHarnessOp(LLMHarnessOp):
    """A test of a running `trtllm-serve`."""

    own_core_type = "trtllm_endpoint"


class TritonClientHarnessOp(LLMHarnessOp):
    """A test of running tritonservers."""

    own_core_type = "triton_grpc"
