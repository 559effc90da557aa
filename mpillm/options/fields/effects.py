"""Which commands and cores use an option: the parts of a field's `effect` (see `unused_options`).

A command here measures or serves. The stages before it (`generate-engines`, `run-llm-server`, …) get the same
arguments, so an option of any of them counts as used. Cores are named as in `core_names`, with the backend if
it is not the core's usual one. A core of your own may use every option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpillm.core_names import (
    DEFAULT,
    DUMMY,
    EMBEDDED,
    TRITON,
    TRTLLM_DISAGG,
    TRTLLM_ENDPOINT,
    TRTLLM_EXECUTOR,
    TRTLLM_HLAPI,
)
from mpillm.options.field import Effect, Use

RUN, SERVE, PLAN, SUBMISSION = "run", "serve", "plan", "submission"
BOTH = (RUN, SERVE)
STAGES = ("generate-engines", "run-llm-server")
"""Commands before these: they build their engines or start their servers."""

LIBRARY = (*TRTLLM_EXECUTOR, *TRTLLM_HLAPI)
COMPUTING = (*EMBEDDED, *LIBRARY, *TRTLLM_DISAGG)
"""Cores that compute here, or whose servers read our YAML."""
MODELS = (*COMPUTING, *TRTLLM_ENDPOINT, *TRITON)
"""All built-in cores with a model behind them."""
CLIENTS = (*TRTLLM_DISAGG, *TRTLLM_ENDPOINT, *TRITON)
"""Cores that are clients of servers, started by `run-llm-server`, by others, or by the run (--server)."""


def used_by(
    *cores: str,
    commands: Sequence[str] = BOTH,
    scenarios: Sequence[str] = (),
    needs: tuple[str, Any] | None = None,
    measured: bool = True,
) -> Effect:
    """Return the effect of an option with one use; `cores`: none means all."""
    return Effect((Use(tuple(commands), tuple(dict.fromkeys(cores)), tuple(scenarios), needs),), measured)


def of_engines(*cores: str, needs: tuple[str, Any] | None = None) -> Effect:
    """Return the effect of an option of an engine; a client's server gets it in a stage before the run."""
    here, behind = (tuple(c for c in cores if (c in CLIENTS) is is_client) for is_client in (False, True))
    each = (BOTH, here), (STAGES, behind)
    return Effect(tuple(Use(commands, of, needs=needs) for commands, of in each if of))


COMPUTED = used_by(DEFAULT, *LIBRARY, *TRTLLM_DISAGG, *DUMMY)
DISAGG = of_engines(*EMBEDDED, *TRTLLM_DISAGG, *DUMMY)
"""For disaggregated serving."""
SIZED = of_engines(*MODELS, *DUMMY)
BUILT = Effect(
    (*SIZED.uses, Use(BOTH, (*TRTLLM_ENDPOINT, *TRTLLM_DISAGG), needs=("enable_attention_dp", True)))
)
"""For an engine's size. With attention data parallelism, it limits the requests of a client's servers."""
TEST = used_by(commands=[RUN])
"""For a test."""
REPORTED = used_by(commands=[RUN], measured=False)
"""For the records of a test."""
SERVED = used_by(commands=[SERVE], measured=False)
SYNTHETIC = used_by(commands=[RUN], needs=("dataset", "synthetic"))
SUBMITTED = used_by(commands=[SUBMISSION], measured=False)
TIME = used_by(measured=False)
TOOLS = used_by(*LIBRARY, *CLIENTS, commands=STAGES, measured=False)
"""For the location of TensorRT-LLM's tools and files."""
SERVERS_OF_TRITON = used_by(*TRITON)
