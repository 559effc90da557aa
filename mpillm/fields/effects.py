"""Who uses options: what the `effect` of a field is made of. `config.idle` tells of values that nobody uses.

A command is one that measures or serves; the stages before it (`generate-engines`, `run-llm-server`, …) are
given the same words, so that an option of any of them counts as used. Cores are named as in `core_names`; a
backend that is not a core's usual one is part of the name. A core of your own may use every option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpillm.configurator.effect import Effect, Use
from mpillm.core_names import (
    DUMMY,
    EMBEDDED,
    TRITON,
    TRTLLM_DISAGG,
    TRTLLM_ENDPOINT,
    TRTLLM_EXECUTOR,
    TRTLLM_HLAPI,
)

RUN, SERVE, PLAN, SUBMISSION = "run", "serve", "plan", "submission"
BOTH = (RUN, SERVE)

LIBRARY = (*TRTLLM_EXECUTOR, *TRTLLM_HLAPI)
COMPUTING = (*EMBEDDED, *LIBRARY, *TRTLLM_DISAGG)
"""Cores that compute here, or whose servers read a YAML that is written here."""
MODELS = (*COMPUTING, *TRTLLM_ENDPOINT, *TRITON)
"""All built-in cores with a model behind them."""


def used_by(
    *cores: str,
    commands: Sequence[str] = BOTH,
    scenarios: Sequence[str] = (),
    needs: tuple[str, Any] | None = None,
    measured: bool = True,
) -> Effect:
    """Return the effect of an option with one use; `cores`: none means all."""
    return Effect((Use(tuple(commands), tuple(dict.fromkeys(cores)), tuple(scenarios), needs),), measured)


COMPUTED = used_by(*COMPUTING, *DUMMY)
DISAGG = used_by(*EMBEDDED, *TRTLLM_DISAGG, *DUMMY)
"""Of disaggregated serving."""
TEST = used_by(commands=[RUN])
"""Of a test."""
REPORTED = used_by(commands=[RUN], measured=False)
"""Of what a test leaves."""
SERVED = used_by(commands=[SERVE], measured=False)
SYNTHETIC = used_by(commands=[RUN], needs=("dataset", "synthetic"))
SUBMITTED = used_by(commands=[SUBMISSION], measured=False)
TIME = used_by(measured=False)
TOOLS = used_by(*LIBRARY, *TRTLLM_ENDPOINT, *TRTLLM_DISAGG, *TRITON, measured=False)
"""Of where TensorRT-LLM's tools are, and their files."""
SERVERS_OF_TRITON = used_by(*TRITON)
