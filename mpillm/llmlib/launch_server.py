"""Operations that write files of servers or run servers: commands of mpillm under NVIDIA's names.

Each accepts options like `LLMHarnessOp`. An operation with servers returns when they end.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from mpillm.llmlib.command_line import command_line


class _CommandOp:
    """Runs a command of mpillm in this process."""

    command: ClassVar[str]  # its module
    fixed: ClassVar[Mapping[str, Any]]  # options of this operation

    @classmethod
    def immediate_dependencies(cls) -> set[type]:
        """Return the operations whose outputs `run` receives."""
        return set()

    @classmethod
    def output_keys(cls) -> list[str]:
        """Return the keys of `run`'s result."""
        return []

    def __init__(self, **options: Any) -> None:
        """`options`: values of fields, by name."""
        self.options = options

    def run(
        self, scratch_space: Any = None, dependency_outputs: Mapping[type, Any] | None = None
    ) -> dict[str, Any]:
        """Run the command. Raises ConfigError, or SystemExit with mpillm's exit code if the command fails."""
        code = importlib.import_module(self.command).main(command_line({**self.options, **self.fixed}))
        if code:
            sys.exit(code)
        return {}


class GenerateTritonConfigOp(_CommandOp):
    """Writes Triton model repositories."""

    command = "mpillm.triton.commands.generate_triton_config"
    fixed: ClassVar[Mapping[str, Any]] = {"harness_type": "triton"}


class GenerateTrtllmDisaggConfigOp(_CommandOp):
    """Writes the disaggregation YAML of `trtllm-serve`'s workers."""

    command = "mpillm.stages.commands.generate_disagg_config"
    fixed: ClassVar[Mapping[str, Any]] = {"core_type": "trtllm_disagg"}


class RunTritonServerOp(_CommandOp):
    """Runs a `tritonserver` for each model repository."""

    command = "mpillm.stages.commands.run_llm_server"
    fixed: ClassVar[Mapping[str, Any]] = {"harness_type": "triton"}


class RunTrtllmServeOp(_CommandOp):
    """Runs a `trtllm-serve` for each URL."""

    command = "mpillm.stages.commands.run_llm_server"
    fixed: ClassVar[Mapping[str, Any]] = {"core_type": "trtllm_endpoint"}


class RunTrtllmServeDisaggOp(_CommandOp):
    """Runs the workers and the leader of a disaggregation YAML."""

    command = "mpillm.stages.commands.run_llm_server"
    fixed: ClassVar[Mapping[str, Any]] = {"core_type": "trtllm_disagg"}
