"""What of a prediction's error the simulation has: a run is simulated once more with its own steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpillm.experiments.advise.calibration import Calibration
from mpillm.experiments.advise.candidates import ONE_RANK, Candidate
from mpillm.experiments.advise.planning import plan_of
from mpillm.experiments.advise.prediction import Load, predict, with_steps_of
from mpillm.experiments.advise.simulated_slots import SlotTimes
from mpillm.experiments.advise.step_times import ALONE, CoreSharing, LinearTime, StepTimes
from mpillm.loadgen.issue_order import IssueOrder
from mpillm.report.request_log import RECORD
from mpillm.report.run_files import RunFiles
from mpillm.telemetry.recorder import StepSums
from tests.helpers.run_directories import read_rows, write_rows

N, TOKENS = 64, 16
TIMES = StepTimes((1, 4), (2e-3, 3e-3), (1e-3, 1e-5, 0.0, 1e-6))
SLOWER = TIMES.scaled(1.4)
LOAD = Load(IssueOrder(np.arange(N), np.zeros(N)), np.full(N, 20), np.full(N, TOKENS))


def costs(times: StepTimes, contexts: int) -> dict[str, list[float]]:
    sums = StepSums()
    for generations in range(1, 5):
        for length in range(20, 40):
            held = (generations, contexts, 20 * contexts, 210 * contexts, generations * length)
            sums.add(times.seconds(held), contexts, generations, *held[2:])
            sums.add(times.seconds((generations, 0, 0, 0, held[4])), 0, generations, 0, 0, held[4])
    return sums.to_json()


def ran(folder: Path, candidate: Candidate, times: StepTimes) -> RunFiles:
    """A run whose steps took `times`, with answers half as long as they may be."""
    rows = np.zeros(N, RECORD)
    rows["index"], rows["tokens"] = np.arange(N), TOKENS // 2
    write_rows(folder, rows)
    roles = ["ctx", "gen"] if candidate.ctx_instances else ["executor", "executor"]
    ranks = [{"rank": i + 1, "roles": [role], "instance": i} for i, role in enumerate(roles)]
    measured = {str(i + 1): {"costs": costs(times, 1)} for i in range(2)}
    return RunFiles(folder, plan={"ranks": ranks}, telemetry={"ranks": measured})


@pytest.mark.parametrize("candidate", [Candidate(ONE_RANK, 2, 4), Candidate(ONE_RANK, 1, 4, ONE_RANK, 1)])
def test_a_slower_machine_is_distinguished_from_a_wrong_simulation(
    candidate: Candidate, tmp_path: Path
) -> None:
    planned = plan_of(["--model_path=tiny-llama", f"--max_output_len={TOKENS}", *candidate.args()], 2)
    half = dict.fromkeys(range(N), TOKENS // 2)
    before = Calibration({ONE_RANK: TIMES}, {}, CoreSharing(2, 1.1), LinearTime(1e-3), {})
    then = Calibration({ONE_RANK: SLOWER}, {}, ALONE, LinearTime(1e-3), half)
    own = with_steps_of(before, candidate, ran(tmp_path, candidate, SLOWER))
    assert own is not None
    found = predict(candidate, planned, own, LOAD, {}).figures["tokens_per_second"]
    expected = predict(candidate, planned, then, LOAD, {}).figures["tokens_per_second"]
    assert found == pytest.approx(expected, rel=1e-3)
    predicted = predict(candidate, planned, before, LOAD, {}).figures["tokens_per_second"]
    assert found != pytest.approx(predicted, rel=0.05)


def test_a_run_of_some_samples_predicts_the_others(tmp_path: Path) -> None:
    """The calibration gives the lengths of answers that the run does not have."""
    candidate = Candidate(ONE_RANK, 2, 4)
    calibration = Calibration({ONE_RANK: TIMES}, {}, ALONE, LinearTime(0.0), {N - 1: TOKENS, 0: 1})
    run = ran(tmp_path, candidate, SLOWER)
    write_rows(run.path, read_rows(run.path)[: N - 1])
    then = with_steps_of(calibration, candidate, run)
    assert then is not None
    assert then.answers[N - 1] == TOKENS and then.answers[0] == then.answers[N - 2] == TOKENS // 2
    held = (4, 1, 20, 210, 100)
    assert then.steps[ONE_RANK].seconds(held) == pytest.approx(SLOWER.seconds(held), rel=1e-3)


def test_a_core_without_steps_has_none(tmp_path: Path) -> None:
    candidate = Candidate(ONE_RANK, 2, 4)
    slots = Calibration({}, {ONE_RANK: SlotTimes(LinearTime(0.1), 0.01)}, ALONE, LinearTime(0.0), {})
    run = RunFiles(tmp_path, plan={"ranks": [{"rank": 1, "roles": ["executor"], "instance": 0}]})
    assert with_steps_of(slots, candidate, run) is None
