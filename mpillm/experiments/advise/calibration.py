"""Calibrate the simulation with short runs: times of steps or requests, sharing of CPU cores, handoff."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpillm.core_names import EMBEDDED
from mpillm.experiments.advise.candidates import ONE_RANK, Candidate, InstanceShape
from mpillm.experiments.advise.planning import world_size
from mpillm.experiments.advise.simulated_slots import SlotTimes
from mpillm.experiments.advise.step_times import CoreSharing, LinearTime, StepTimes, fit, shared, slowdown
from mpillm.experiments.run_series import must_have_verdict
from mpillm.options.options import parse_run
from mpillm.report.numbers import rate_text
from mpillm.report.request_log import read_requests
from mpillm.report.run_files import RunFiles
from mpillm.runtime.whole_runs import run_in
from mpillm.telemetry.other_load import measure_undisturbed

_ALONE = 8  # requests, one after another
# Length of a run with full batches, and limits of its requests per instance:
_BUSY_S = 5.0
_WAVES = 3  # at least this many batches
_MAX_REQUESTS = 1000
# Length of a run directly before a verification, which has at least a full batch and at most half the test.
_AGAIN_S = 10.0

Costs = list[Mapping[str, Any]]


@dataclass(frozen=True)
class Calibration:
    """Speed of the machine with the model, for the simulation."""

    steps: Mapping[InstanceShape, StepTimes]  # if the core reports its steps
    slots: Mapping[InstanceShape, SlotTimes]  # otherwise
    sharing: CoreSharing
    handoff: LinearTime
    answers: Mapping[int, int]  # tokens of the measured answers, by index in the data set

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for --output."""
        return {
            "step_seconds": {str(layout): asdict(one) for layout, one in self.steps.items()},
            "request_seconds": {
                str(layout): [one.first.constant, one.first.per_token, one.per_token]
                for layout, one in self.slots.items()
            },
            "slowdown": {"ranks": self.sharing.max_ranks, "factor": self.sharing.factor},
            "handoff_seconds": [self.handoff.constant, self.handoff.per_token],
        }


@dataclass
class Calibrator:
    """Runs the short runs of a calibration."""

    folder: Path
    mpirun: Sequence[str]  # its options except -n
    args: Sequence[str]  # of `run`, as typed
    threads: int  # of a rank in the predicted runs
    max_batch_size: int
    model: str  # as LoadGen names it
    user_conf: str | None
    prompt_tokens: Sequence[int]  # by index in the data set
    repeats: int  # of each run
    report: Callable[[str], None]
    answers: dict[int, int] = field(default_factory=dict)

    def calibrate(self, candidates: Sequence[Candidate], ranks: int) -> Calibration:
        """Measure the instance shapes of these candidates, for `ranks` worker ranks.

        Raises ConfigError or StageError if a run fails.
        """
        split = [one for one in candidates if one.ctx_instances]
        layouts = sorted({one.layout for one in candidates} | {one.ctx_layout for one in split})
        base = min(split, key=lambda one: one.layout.ranks + one.ctx_layout.ranks, default=None)
        pair = base and replace(base, instances=1, ctx_instances=1, max_batch_size=self.max_batch_size)
        alone: dict[InstanceShape, list[RunFiles]] = defaultdict(list)
        batches: dict[InstanceShape, list[RunFiles]] = defaultdict(list)
        concurrent, pairs = [], []
        # Alternate, because the machine's speed may change.
        for _ in range(self.repeats):
            for layout in layouts:
                one = Candidate(layout, 1, self.max_batch_size)
                run = self._run(f"{layout}, one request at a time", one, "SingleStream", _ALONE)
                alone[layout].append(run)
                if not _costs(run):
                    continue
                rate = 1e3 / run.result["latency_ms"]["mean"]
                for size in sorted({max(1, self.max_batch_size // 4), self.max_batch_size}):
                    some, n = replace(one, max_batch_size=size), _many(size, rate)
                    batches[layout].append(self._run(f"{layout}, {size} at a time", some, "Offline", n))
                if layout.ranks == 1 and ranks > 1:
                    every, n = replace(one, instances=ranks), ranks * _many(self.max_batch_size, rate)
                    concurrent.append(self._run(f"{ranks} x {layout} together", every, "Offline", n))
            if pair:
                label = "handoff to a generation instance, one request at a time"
                pairs.append(self._run(label, pair, "SingleStream", _ALONE))
        steps = {layout: _step_times(layout, alone[layout], runs) for layout, runs in batches.items()}
        slots = {layout: self._slot_times(alone[layout]) for layout in layouts if layout not in steps}
        sharing = CoreSharing()
        if concurrent:
            steps[ONE_RANK], sharing = shared(steps[ONE_RANK], ranks, _costs(*concurrent))
        handoff = self._handoff(pairs, slots.get(pair.layout)) if pair else LinearTime(0.0)
        return Calibration(steps, slots, sharing, handoff, self.answers)

    def again(self, candidate: Candidate, samples_per_second: float, n_samples: int) -> RunFiles:
        """Run the first seconds of the candidate's test, to measure the machine's current speed.

        `samples_per_second`: predicted; `n_samples`: of the whole test. Raises ConfigError or StageError if
        the run fails.
        """
        places = candidate.instances * candidate.max_batch_size
        n = max(min(n_samples, places), min(n_samples // 2, round(_AGAIN_S * samples_per_second)))
        scenario = parse_run(self.args).scenario
        return self._measure(f"{candidate} again", candidate, scenario, n)

    def _run(self, label: str, candidate: Candidate, scenario: str, queries: int) -> RunFiles:
        run, others = measure_undisturbed(lambda: self._measure(label, candidate, scenario, queries))
        self.report(f"  {label}: {rate_text(run.result['tokens_per_second'])} tokens/s{others.note()}")
        rows = read_requests(run.path)
        self.answers |= dict(zip(rows["index"].tolist(), rows["tokens"].tolist(), strict=True))
        return run

    def _measure(self, label: str, candidate: Candidate, scenario: str, queries: int) -> RunFiles:
        number = len([*self.folder.glob("calibration-*")]) // 2 + 1
        folder = self.folder / f"calibration-{number:02d}"
        conf = folder.with_suffix(".conf")
        text = (
            Path(self.user_conf).read_text(encoding="utf-8-sig").rstrip("\n") + "\n" if self.user_conf else ""
        )
        # Without this, LoadGen only issues whole passes over the data set.
        conf.write_text(
            f"{text}{self.model}.{scenario}.sample_concatenate_permutation = 0\n", encoding="utf-8"
        )
        options = [
            *self.args,
            *candidate.args(),
            f"--scenarios={scenario}",
            *([f"--num_threads={self.threads}"] if parse_run(self.args).core_type in EMBEDDED else []),
        ]
        options += [f"--min_query_count={queries}", "--min_duration=0", f"--user_conf={conf}"]
        must_have_verdict(
            run_in(folder, ["-n", str(world_size(self.args, candidate.ranks)), *self.mpirun], options),
            f"the calibration ({label})",
        )
        return RunFiles.read(folder)

    def _slot_times(self, runs: Sequence[RunFiles]) -> SlotTimes:
        rows = np.concatenate([read_requests(run.path) for run in runs])
        more = rows["tokens"] > 1
        after = (rows["latency"] - rows["ttft"])[more] / (rows["tokens"][more] - 1)
        first = LinearTime.through([self.prompt_tokens[i] for i in rows["index"]], rows["ttft"].tolist())
        return SlotTimes(first, float(np.median(after)) if len(after) else 0.0)

    def _handoff(self, runs: Sequence[RunFiles], slots: SlotTimes | None) -> LinearTime:
        """Return the time between a first token and the steps of the other tokens."""
        tokens, seconds = [], []
        for run in runs:
            steps = None
            if slots is None:
                # From this run, so that a slower machine does not count as handoff time.
                steps = fit(
                    costs
                    for one in run.instances().values()
                    if one.role == "gen"
                    for costs in step_costs(run, one.ranks)
                )
            for row in read_requests(run.path):
                n_prompt, n = self.prompt_tokens[row["index"]], int(row["tokens"])
                if n < 2:
                    continue
                if steps is not None:
                    expected = sum(steps.seconds((1, 0, 0, 0, n_prompt + i)) for i in range(1, n))
                else:
                    assert slots is not None
                    expected = (n - 1) * slots.per_token
                tokens.append(float(n_prompt))
                seconds.append(float(row["latency"] - row["ttft"]) - expected)
        return LinearTime.through(tokens, seconds) if tokens else LinearTime(0.0)


def _many(places: int, rate: float) -> int:
    """Return the requests that keep `places` busy long enough. `rate`: of one place alone, per second."""
    # Each place is about half as fast when all are busy.
    return max(_WAVES * places, min(_MAX_REQUESTS, round(_BUSY_S * rate * places / 2)))


def _step_times(layout: InstanceShape, alone: Sequence[RunFiles], batches: Sequence[RunFiles]) -> StepTimes:
    if layout.pp == 1:
        return fit(_costs(*alone, *batches))
    between = fit(_costs(*batches))
    return replace(between, alone=max(1.0, slowdown(between, _costs(*alone))))


def _costs(*runs: RunFiles) -> Costs:
    return [costs for run in runs for costs in step_costs(run)]


def step_costs(run: RunFiles, ranks: Sequence[int] | None = None) -> Costs:
    """Return the `StepSums` of each instance whose core reports its steps; `ranks`: only of these ranks."""
    ranks_telemetry = run.telemetry.get("ranks", {})
    of = ranks_telemetry.values() if ranks is None else [ranks_telemetry.get(str(rank), {}) for rank in ranks]
    return [rank["costs"] for rank in of if rank.get("costs", {}).get("n")]
