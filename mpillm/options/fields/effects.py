"""Who uses options: what the `effect` of a field is made of. `config.idle` tells of values that nobody uses.

A command is one that measures or serves; the stages before it (`generate-engines`, `run-llm-server`, …) are
given the same words, so that an option of any of them counts as used. Cores are named as in `core_names`; a
backend that is not a core's usual one is part of the name. A core of your own may use every option.
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
from mpillm.options.effect import Effect, Use

RUN, SERVE, PLAN, SUBMISSION = "run", "serve", "plan", "submission"
BOTH = (RUN, SERVE)
STAGES = ("generate-engines", "run-llm-server")
"""Commands before these, which make what they run or talk to."""

LIBRARY = (*TRTLLM_EXECUTOR, *TRTLLM_HLAPI)
COMPUTING = (*EMBEDDED, *LIBRARY, *TRTLLM_DISAGG)
"""Cores that compute here, or whose servers read a YAML that is written here."""
MODELS = (*COMPUTING, *TRTLLM_ENDPOINT, *TRITON)
"""All built-in cores with a model behind them."""
CLIENTS = (*TRTLLM_DISAGG, *TRTLLM_ENDPOINT, *TRITON)
"""Cores that are clients of servers, which `run-llm-server` or others start, unless a run does (--server)."""


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
    """As `used_by`, of an option that says how an engine runs: a client's engine is its server's, which has
    the option from a stage before the run."""
    here, behind = (tuple(c for c in cores if (c in CLIENTS) is is_client) for is_client in (False, True))
    each = (BOTH, here), (STAGES, behind)
    return Effect(tuple(Use(commands, of, needs=needs) for commands, of in each if of))


COMPUTED = used_by(DEFAULT, *LIBRARY, *TRTLLM_DISAGG, *DUMMY)
DISAGG = of_engines(*EMBEDDED, *TRTLLM_DISAGG, *DUMMY)
"""Of disaggregated serving."""
SIZED = of_engines(*MODELS, *DUMMY)
BUILT = Effect(
    (
        *SIZED.uses,
        Use(
            BOTH,
            (*TRTLLM_ENDPOINT, *TRTLLM_DISAGG),
            needs=("enable_attention_dp", True),
        ),
    )
)
"""Of an engine's size. By attention data parallelism a client knows how many requests its servers take."""
TEST = used_by(commands=[RUN])
"""Of a test."""
REPORTED = used_by(commands=[RUN], measured=False)
"""Of what a test leaves."""
SERVED = used_by(commands=[SERVE], measured=False)
SYNTHETIC = used_by(commands=[RUN], needs=("dataset", "synthetic"))
SUBMITTED = used_by(commands=[SUBMISSION], measured=False)
TIME = used_by(measured=False)
TOOLS = used_by(*LIBRARY, *CLIENTS, commands=STAGES, measured=False)
"""Of where TensorRT-LLM's tools are, and their files."""
SERVERS_OF_TRITON = used_by(*TRITON)
