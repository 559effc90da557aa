"""A stand-in for TensorRT-LLM, made from the record of its interface in tests/data/trtllm.

It refuses what the record does not have: a name, a keyword, a missing argument, an enum's member. Its models
answer a prompt with the prompt backwards; a prompt that begins with REFUSED gets an error. As the real
package's, its import is collective over MPI.COMM_WORLD.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from mpi4py import MPI

from .executor import EXECUTOR, MpiComm
from .llm import CONFIGS, LLM, MpiCommSession, SamplingParams, TrtLLM, set_mpi_comm
from .record import RECORD

__version__ = RECORD["version"]

if MPI.Is_initialized():
    MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Free()


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(f"tensorrt_llm.{name}")
    made.__dict__.update(members)
    sys.modules[made.__name__] = made
    return made


bindings = _module("bindings", MpiComm=MpiComm, executor=EXECUTOR)
sys.modules["tensorrt_llm.bindings.executor"] = EXECUTOR
llmapi = _module("llmapi", LLM=LLM, SamplingParams=SamplingParams, **CONFIGS)
_module("llmapi.mpi_session", MpiCommSession=MpiCommSession)
_module("_utils", set_mpi_comm=set_mpi_comm)
# Before 1.0, the package's own LLM was the TensorRT backend's.
if "TrtLlmArgs" in RECORD["python"] and not __version__.startswith("0."):
    _module("_tensorrt_engine", LLM=TrtLLM)
