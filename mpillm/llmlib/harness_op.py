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
from mpillm.llmlib.cores.base import LLMCore
from mpillm.llmlib.dataset import LLMDataLoader
from mpillm.llmlib.rank_core import RankCore
from mpillm.llmlib.words import command_line
from mpillm.options.fields import AllFields
from mpillm.options.mitten import option_texts
from mpillm.workloads import Workload


class LLMHarnessOp:
    """Runs a test: `mpillm run` with the values of this call, the command line, the configuration in force.

    The first of these wins. Start a script with one of these as it is, or with mpirun. A process can run one
    test.
    """

    data_loader: ClassVar[type[LLMDataLoader] | None] = None  # None: the data set of the options
    own_core_type: ClassVar[str | None] = None  # of a variant: the core that a call need not name

    @classmethod
    def immediate_dependencies(cls) -> set[type]:
        """Operations whose outputs `run` is given."""
        return set()

    @classmethod
    def output_keys(cls) -> list[str]:
        """Return the keys of what `run` returns."""
        return ["log_dir", "result_metadata"]

    def __init__(
        self,
        *,
        workload: Workload | str | None = None,
        core_type: type[LLMCore] | str | None = None,
        **options: Any,
    ) -> None:
        """`options`: values of other fields, by name. Raises ConfigError naming one that is not a field."""
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
        """Return arguments for `get_num_cores_for_workload` and `get_config_for_core`, besides
        --core_options."""
        return {}

    def run(
        self, scratch_space: Any = None, dependency_outputs: Mapping[type, Any] | None = None
    ) -> dict[str, Any]:
        """Run the test; return the run directory, and on rank 0 the content of its result.json.

        SystemExit with mpillm's exit code: the test failed.
        """
        words = self.words()
        (core_type,) = option_texts([AllFields.core_type], words).values() or (AllFields.core_type.default,)
        with contextlib.suppress(ConfigError):  # the run reports it, once
            if issubclass(core := BackendRegistry.get(core_type), RankCore):
                core.backend_kwargs = self.get_backend_kwargs(dependency_outputs or {})
        code, log_dir = start(words)
        if code:
            sys.exit(code)
        result = Path(log_dir) / "result.json"
        return {
            "log_dir": log_dir,
            "result_metadata": json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {},
        }

    def words(self) -> list[str]:
        """Return the command line of the run."""
        said: dict[str, Any] = dict(self.options)
        if self.wl is not None:
            said["benchmarks"] = self.wl if isinstance(self.wl, str) else self.wl.name
        if self.core_type is not None:
            said["core_type"] = _path(self.core_type) if isinstance(self.core_type, type) else self.core_type
        if self.data_loader is not None:
            said["dataset"] = _path(self.data_loader)
        return command_line(said)


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
    """A test of `trtllm-serve`, which runs already."""

    own_core_type = "trtllm_endpoint"


class TritonClientHarnessOp(LLMHarnessOp):
    """A test of tritonservers, which run already."""

    own_core_type = "triton_grpc"
