"""Predict a candidate's figures by simulating its test with the calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpillm.experiments.advise.calibration import Calibration, step_costs
from mpillm.experiments.advise.candidates import Candidate, InstanceShape
from mpillm.experiments.advise.simulated_instances import (
    Instance,
    InstanceListener,
    SimulatedRequest,
    StepInstance,
)
from mpillm.experiments.advise.simulated_slots import SlotInstance
from mpillm.experiments.advise.simulator import At, Make, Simulation, System, latencies
from mpillm.experiments.advise.step_times import ALONE, fit
from mpillm.loadgen.issue_order import IssueOrder
from mpillm.loadgen.logs import quantile
from mpillm.report.request_log import read_requests
from mpillm.report.run_files import RunFiles

if TYPE_CHECKING:
    from mpillm.runtime.join import RunPlan

_UNBOUNDED = 1 << 40  # tokens of a KV cache that a core does not have


@dataclass(frozen=True)
class Load:
    """Load of a test: the samples that LoadGen issues, and their lengths by index in the data set."""

    issued: IssueOrder
    n_prompt: NDArray[np.int64]
    max_output: NDArray[np.int64]

    def requests(self, answers: Mapping[int, int]) -> list[SimulatedRequest]:
        """Return the requests. Unmeasured answers get the relative length of a random measured answer."""
        shares = [n / self.max_output[i] for i, n in sorted(answers.items()) if i < len(self.max_output)]
        fractions = np.random.default_rng(0).choice(shares or [1.0], len(self.max_output))
        n_output = np.maximum(1, np.rint(fractions * self.max_output)).astype(np.int64)
        for index, n in answers.items():
            n_output[index] = min(n, self.max_output[index])
        return [
            SimulatedRequest(int(self.n_prompt[i]), int(n_output[i]), int(self.max_output[i]), float(at))
            for i, at in zip(self.issued.indices, self.issued.at, strict=True)
        ]


@dataclass(frozen=True)
class Prediction:
    """A candidate's predicted figures."""

    candidate: Candidate
    figures: Mapping[str, Any]  # the keys of `option_grid.figures`
    good_per_second: float  # requests that meet all limits; without limits all requests


def predict(
    candidate: Candidate,
    planned: RunPlan,
    calibration: Calibration,
    load: Load,
    limits_ms: Mapping[str, float],
) -> Prediction:
    """Simulate the candidate's test. `planned`: its plan. Raises StageError if the test would not end."""
    requests = load.requests(calibration.answers)
    simulation = Simulation(_system(candidate, planned, calibration), _maker(candidate, planned, calibration))
    simulation.run(requests)
    seconds = max(request.ended for request in requests)
    first, per_token = latencies(requests)
    latency = np.array([request.ended - request.issued for request in requests])
    good = np.ones(len(requests), np.bool_)
    for name, limit in limits_ms.items():
        value = {"ttft": first, "tpot": per_token, "e2el": latency}[name]
        good &= ~(value > limit / 1e3)
    tokens = sum(request.n_output for request in requests) / seconds
    known = per_token[~np.isnan(per_token)]
    figures = {
        "samples_per_second": len(requests) / seconds,
        "tokens_per_second": tokens,
        "tokens_per_second_per_gpu": tokens / candidate.ranks,
        "tokens_per_second_per_user": 1 / float(known.mean()) if len(known) and known.mean() else None,
        "ttft_p99_ms": 1e3 * quantile(first, 0.99),
        "tpot_p99_ms": 1e3 * quantile(known, 0.99) if len(known) else None,
    }
    return Prediction(candidate, figures, float(good.sum()) / seconds)


def with_steps_of(calibration: Calibration, candidate: Candidate, run: RunFiles) -> Calibration | None:
    """Return the calibration with the step times and answers of a run of the candidate.

    A short run directly before the candidate's run shows the machine's current speed. With the candidate's
    own run, the remaining error is the simulation's error; the other part of a prediction's error is due to
    changed step times.

    Returns: None if the core does not report its steps.
    """
    costs: dict[InstanceShape, list[Mapping[str, Any]]] = {}
    for instance in run.instances().values():
        layout = candidate.ctx_layout if instance.role == "ctx" else candidate.layout
        costs.setdefault(layout, []).extend(step_costs(run, instance.ranks[:1]))
    if not calibration.steps or not all(costs.values()):
        return None
    steps = {
        layout: replace(fit(own), alone=calibration.steps[layout].alone) for layout, own in costs.items()
    }
    rows = read_requests(run.path)
    seen = dict(zip(rows["index"].tolist(), rows["tokens"].tolist(), strict=True))
    # These step times already include the slowdown by ranks on the same CPU cores.
    return replace(calibration, steps=steps, sharing=ALONE, answers={**calibration.answers, **seen})


def _system(candidate: Candidate, planned: RunPlan, calibration: Calibration) -> System:
    caches = [_kv_tokens(planned, i) for i in range(len(planned.cores))]
    policy, n = planned.config.traffic_distribution_policy, candidate.ctx_instances
    is_engine = bool(calibration.steps)  # its instances grant twice their KV cache as credits
    return System(
        entries=n or candidate.instances,
        generations=candidate.instances if n else 0,
        requests=2 * candidate.max_batch_size,
        tokens=(2 if is_engine else 1) * caches[0],
        generation_tokens=caches[-1],
        policy=policy,
        sharing=calibration.sharing,
        handoff=calibration.handoff,
    )


def _maker(candidate: Candidate, planned: RunPlan, calibration: Calibration) -> Make:
    def make(generates: bool, listener: InstanceListener, at: At) -> Instance:
        hands_over = bool(candidate.ctx_instances) and not generates
        layout = candidate.ctx_layout if hands_over else candidate.layout
        which = 0 if hands_over or not candidate.ctx_instances else len(planned.cores) - 1
        scheduler = planned.cores[which].engine.scheduler
        if (slots := calibration.slots.get(layout)) is not None:
            return SlotInstance(scheduler.max_batch_size, slots, layout.ranks, hands_over, listener, at)
        return StepInstance(
            scheduler,
            _kv_tokens(planned, which),
            calibration.steps[layout],
            layout.ranks,
            layout.pp,
            hands_over,
            listener,
        )

    return make


def _kv_tokens(planned: RunPlan, which: int) -> int:
    tokens = getattr(planned.models[which], "kv_cache_tokens", None)
    return int(tokens or planned.cores[which].engine.kv_cache_tokens or _UNBOUNDED)


def best(predictions: Sequence[Prediction], n: int) -> list[Prediction]:
    """Return the best `n` predictions of different shapes.

    The most good tokens/s win; among candidates within 1 %, the most tokens/s per user.
    """
    shapes: dict[Candidate, Prediction] = {}
    for one in sorted(predictions, key=_merit, reverse=True):
        shapes.setdefault(one.candidate.shape, one)
    return list(shapes.values())[:n]


def _merit(one: Prediction) -> tuple[float, float]:
    share = one.good_per_second / one.figures["samples_per_second"]
    good = share * one.figures["tokens_per_second"]
    # Within 1 %: the same integer power of 1.01.
    return float(np.floor(np.log(max(good, 1e-9)) / np.log(1.01))), one.figures[
        "tokens_per_second_per_user"
    ] or 0.0
