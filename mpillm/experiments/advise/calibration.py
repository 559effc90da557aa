"""What short runs of this program say of its speed: times of steps or requests, sharing of cores, handoff."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import disagg
from mpillm.bench.other_load import OtherLoad
from mpillm.bench.whole_runs import run_in
from mpillm.experiments.advise.candidates import Candidate, Layout
from mpillm.experiments.advise.simulated_slots import SlotTimes
from mpillm.experiments.advise.step_times import Line, Sharing, StepTimes, fit, slowdown
from mpillm.experiments.run_series import must_have_verdict
from mpillm.report.request_log import read_requests
from mpillm.report.run_files import RunFiles

_ALONE = 8  # requests one after another
# A run that fills all places lasts about this long, but answers no fewer and no more for each instance:
_BUSY_S = 5.0
_WAVES = 3  # times its places
_MOST = 1000

Costs = list[Mapping[str, Any]]


@dataclass(frozen=True)
class Calibration:
    """What the simulation needs to know of the machine and the model."""

    steps: Mapping[Layout, StepTimes]  # if the core tells its steps
    slots: Mapping[Layout, SlotTimes]  # if it does not
    sharing: Sharing
    handoff: Line
    answers: Mapping[int, int]  # tokens of the answers that were seen, by index in the data set

    def to_json(self) -> dict[str, Any]:
        """Return it for the file of --output."""
        return {
            "step_seconds": {str(layout): one.coefficients for layout, one in self.steps.items()},
            "request_seconds": {
                str(layout): [one.first.constant, one.first.per_token, one.per_token]
                for layout, one in self.slots.items()
            },
            "slowdown": {"ranks": self.sharing.most, "factor": self.sharing.factor},
            "handoff_seconds": [self.handoff.constant, self.handoff.per_token],
        }


@dataclass
class Calibrator:
    """Runs what a calibration needs, once each."""

    folder: Path
    mpirun: Sequence[str]  # its options besides -n
    words: Sequence[str]  # of `run`, as typed
    threads: int  # of a rank, as in the runs that are predicted
    max_batch_size: int
    model: str  # as LoadGen names it
    user_conf: str | None
    prompt_tokens: Sequence[int]  # by index in the data set
    say: Callable[[str], None]
    answers: dict[int, int] = field(default_factory=dict)

    def calibrate(self, candidates: Sequence[Candidate], ranks: int) -> Calibration:
        """Measure what these candidates consist of, for `ranks` worker ranks.

        Raises ConfigError or StageError if a run fails.
        """
        steps: dict[Layout, StepTimes] = {}
        slots: dict[Layout, SlotTimes] = {}
        sharing = Sharing()
        split = [one for one in candidates if one.ctx_instances]
        for layout in sorted({one.layout for one in candidates} | {one.ctx_layout for one in split}):
            one = Candidate(layout, 1, self.max_batch_size)
            alone = self._run(f"{layout}, one request at a time", one, "SingleStream", _ALONE)
            if not (costs := _costs(alone)):
                slots[layout] = self._slot_times(alone)
                continue
            # More than one request's worth at a time, fewer than all places'.
            rate = self.max_batch_size / 2 / alone.result["latency_ms"]["mean"] * 1e3
            full = self._run(f"{layout}, a full batch", one, "Offline", self._many(1, rate))
            if layout.pp == 1:
                steps[layout] = fit([*costs, *_costs(full)])
            else:
                between = fit(_costs(full))
                steps[layout] = replace(between, alone=slowdown(between, costs))
            if layout.ranks == 1 and ranks > 1:
                every = Candidate(layout, ranks, self.max_batch_size)
                beside = self._run(f"{ranks} x {layout} at once", every, "Offline", self._many(ranks, rate))
                sharing = Sharing(ranks, slowdown(steps[layout], _costs(beside)))
        handoff = Line(0.0)
        if split:
            least = min(split, key=lambda one: one.layout.ranks + one.ctx_layout.ranks)
            pair = replace(least, instances=1, ctx_instances=1, max_batch_size=self.max_batch_size)
            run = self._run(
                "a context instance hands over, one request at a time", pair, "SingleStream", _ALONE
            )
            handoff = self._handoff(run, steps.get(pair.layout), slots.get(pair.layout))
        return Calibration(steps, slots, sharing, handoff, self.answers)

    def _many(self, instances: int, rate: float) -> int:
        """Return how many requests keep instances busy that answer `rate` per second each, about."""
        return instances * max(_WAVES * self.max_batch_size, min(_MOST, round(_BUSY_S * rate)))

    def _run(self, what: str, candidate: Candidate, scenario: str, queries: int) -> RunFiles:
        number = len([*self.folder.glob("calibration-*")]) // 2 + 1
        folder = self.folder / f"calibration-{number:02d}"
        conf = folder.with_suffix(".conf")
        text = (
            Path(self.user_conf).read_text(encoding="utf-8-sig").rstrip("\n") + "\n" if self.user_conf else ""
        )
        # Otherwise whole passes over the data set.
        conf.write_text(
            f"{text}{self.model}.{scenario}.sample_concatenate_permutation = 0\n", encoding="utf-8"
        )
        options = [
            *self.words,
            *candidate.words(),
            f"--scenarios={scenario}",
            f"--num_threads={self.threads}",
        ]
        options += [f"--min_query_count={queries}", "--min_duration=0", f"--user_conf={conf}"]
        world_size = disagg.ranks_for(candidate.ranks)
        load = OtherLoad()
        ended = run_in(folder, ["-n", str(world_size), *self.mpirun], options)
        must_have_verdict(ended, f"the calibration ({what})")
        run = RunFiles.read(folder)
        self.say(f"  {what}: {ended.result['tokens_per_second']:,.4g} tokens/s{load.said()}")
        rows = read_requests(folder)
        self.answers |= dict(zip(rows["index"].tolist(), rows["tokens"].tolist(), strict=True))
        return run

    def _slot_times(self, run: RunFiles) -> SlotTimes:
        rows = read_requests(run.path)
        more = rows["tokens"] > 1
        after = (rows["latency"] - rows["ttft"])[more] / (rows["tokens"][more] - 1)
        first = Line.through([self.prompt_tokens[i] for i in rows["index"]], rows["ttft"].tolist())
        return SlotTimes(first, float(np.median(after)) if len(after) else 0.0)

    def _handoff(self, run: RunFiles, steps: StepTimes | None, slots: SlotTimes | None) -> Line:
        """Return what passes between a first token and the steps of the other tokens."""
        tokens, seconds = [], []
        for row in read_requests(run.path):
            n_prompt, n = self.prompt_tokens[row["index"]], int(row["tokens"])
            if n < 2:
                continue
            if steps is not None:
                expected = sum(steps.seconds((0, 0, 0, 1, n_prompt + i)) for i in range(1, n))
            else:
                assert slots is not None
                expected = (n - 1) * slots.per_token
            tokens.append(float(n_prompt))
            seconds.append(float(row["latency"] - row["ttft"]) - expected)
        return Line.through(tokens, seconds) if tokens else Line(0.0)


def _costs(run: RunFiles) -> Costs:
    """Return the `StepSums` of each instance whose core told its steps."""
    ranks = run.telemetry.get("ranks", {}).values()
    return [rank["costs"] for rank in ranks if rank.get("costs", {}).get("n")]
