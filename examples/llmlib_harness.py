"""A core and a harness with the classes of NVIDIA's llmlib. They run alone, or on the ranks of an mpirun:

python examples/llmlib_harness.py --scenarios Server --server_target_qps 20 --min_duration 5
mpirun -n 3 python examples/llmlib_harness.py
"""

from __future__ import annotations

import dataclasses
import datetime
import queue
from collections.abc import Iterator
from typing import Any

from mpillm.llmlib import HarnessConfig, LLMCore, LLMHarnessOp, LLMRequest, LLMResponse


@dataclasses.dataclass
class EchoConfig(HarnessConfig):
    """Settings of this backend, in addition to the common settings."""

    backwards: bool = True


class EchoCore(LLMCore):
    """Core that answers each prompt with the reversed prompt, cut to the maximum output length."""

    CONFIG_T = EchoConfig

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ready: queue.SimpleQueue[LLMRequest] = queue.SimpleQueue()

    def _enqueue_impl(self, queries: list[LLMRequest]) -> list[int]:
        for query in queries:
            self._ready.put(query)
        return [query.request_id for query in queries]

    def _poll_responses_impl(self, timeout: datetime.timedelta) -> Iterator[LLMResponse]:
        try:
            query = self._ready.get(timeout=timeout.total_seconds())
        except queue.Empty:
            return
        generation, step = self.harness_config.gen_config, -1 if self.harness_config.backwards else 1
        answer = query.input_tokens[::step][: generation.max_output_len]
        pieces = [[token] for token in answer] if generation.streaming else [answer]
        for number, piece in enumerate(pieces, 1):
            yield LLMResponse(query.request_id, [piece], is_final_token=number == len(pieces), error=None)

    def run_health_check(self) -> None:
        """Raise here if the backend does not answer yet. The health check is repeated."""

    @classmethod
    def get_num_cores_for_workload(cls, n_cores: int = 1, **kwargs: Any) -> int:
        return n_cores

    @classmethod
    def get_config_for_core(cls, core_index: int, n_cores: int = 1, **kwargs: Any) -> dict[str, Any]:
        return {"name": f"EchoCore#{core_index}", "harness_config": cls.CONFIG_T(), **kwargs}


class EchoHarnessOp(LLMHarnessOp):
    """Harness with four cores, distributed over the instances of the run."""

    def get_backend_kwargs(self, dependency_outputs: Any) -> dict[str, Any]:
        return {"n_cores": 4}


if __name__ == "__main__":
    EchoHarnessOp(core_type=EchoCore).run()
