"""Which commands and cores use an option: the parts of a field's `effect` (see `unused_options`).

Here, commands are those that measure or serve. The stages before them (`generate-engines`, `run-llm-server`,
…) get the same arguments, so an option of any stage counts as used. Cores are named as in `core_names`, with
the backend if it is not the core's default one. A core that the user supplies may use every option.
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
from mpillm.programs.load_clients.kinds import CONVERSATIONS

RUN, SERVE, PLAN, SUBMISSION = "run", "serve", "plan", "submission"
FIND_MAX_QPS = "find-max-qps"
BOTH = (RUN, SERVE)
STAGES = ("generate-engines", "run-llm-server")
"""Commands before a measurement or a server: they build engines or start servers."""

LOADGEN, LOAD_CLIENTS = "LoadGen", "load clients"
"""Two of three sources of a run's load. The third one is CONVERSATIONS."""
PROMPTS = (LOADGEN, LOAD_CLIENTS)
"""The sources of single prompts. A load client sends as many as LoadGen would."""
OWN_LOADS = (LOADGEN, CONVERSATIONS)
"""The sources in rank 0, which records each request. A load client makes its own records."""

LIBRARY = (*TRTLLM_EXECUTOR, *TRTLLM_HLAPI)
COMPUTING = (*EMBEDDED, *LIBRARY, *TRTLLM_DISAGG)
"""Cores that compute in the ranks, or whose servers read mpillm's YAML."""
MODELS = (*COMPUTING, *TRTLLM_ENDPOINT, *TRITON)
"""All built-in cores with a model behind them."""
CLIENTS = (*TRTLLM_DISAGG, *TRTLLM_ENDPOINT, *TRITON)
"""Cores that are clients. `run-llm-server`, other programs or the run (--server) start their servers."""


def used_by(
    *cores: str,
    commands: Sequence[str] = BOTH,
    scenarios: Sequence[str] = (),
    needs: tuple[str, Any] | None = None,
    loads: Sequence[str] = (),
    measured: bool = True,
) -> Effect:
    """Return the effect of an option with one use; `cores`: none means all."""
    use = Use(tuple(commands), tuple(dict.fromkeys(cores)), tuple(scenarios), needs, tuple(loads))
    return Effect((use,), measured)


def of_engines(*cores: str, needs: tuple[str, Any] | None = None) -> Effect:
    """Return the effect of an engine's option. A client's server gets it in a stage before the run."""
    here, behind = (tuple(c for c in cores if (c in CLIENTS) is is_client) for is_client in (False, True))
    each = (BOTH, here), (STAGES, behind)
    return Effect(tuple(Use(commands, of, needs=needs) for commands, of in each if of))


COMPUTED = used_by(DEFAULT, *LIBRARY, *TRTLLM_DISAGG, *DUMMY)
DISAGG = of_engines(*EMBEDDED, *TRTLLM_DISAGG, *DUMMY)
"""Options for disaggregated serving."""
SIZED = of_engines(*MODELS, *DUMMY)
BUILT = Effect(
    (*SIZED.uses, Use(BOTH, (*TRTLLM_ENDPOINT, *TRTLLM_DISAGG), needs=("enable_attention_dp", True)))
)
"""An engine's size. With attention data parallelism, it limits the requests to a client's servers."""
TEST = used_by(commands=[RUN])
"""Options of a test."""
OF_LOADGEN = used_by(commands=[RUN], loads=[LOADGEN])
OF_OWN_LOADS = used_by(commands=[RUN], loads=OWN_LOADS)
OF_PROMPTS = used_by(commands=[RUN], loads=PROMPTS)
OF_CONVERSATIONS = used_by(commands=[RUN], loads=[CONVERSATIONS])
REPORTED = used_by(commands=[RUN], measured=False)
"""Options of a test that only its records contain."""
SERVED = used_by(commands=[SERVE], measured=False)
SYNTHETIC = used_by(commands=[RUN], needs=("dataset", "synthetic"))
SUBMITTED = used_by(commands=[SUBMISSION], measured=False)
TIME = used_by(measured=False)
TOOLS = used_by(*LIBRARY, *CLIENTS, commands=STAGES, measured=False)
"""For the location of TensorRT-LLM's tools and files."""
SERVERS_OF_TRITON = used_by(*TRITON)
