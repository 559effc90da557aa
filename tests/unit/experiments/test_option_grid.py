"""Grids of options: points, their names, and the Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.experiments.option_grid import figures, finished, grid_of_args, grid_of_yaml, grid_points, pareto
from mpillm.report.run_files import RunFiles
from tests.helpers.run_directories import make_run, write


def test_an_option_with_several_words_is_varied() -> None:
    grid = grid_of_args(
        ["--max-batch-size", "4", "8", "--save_outputs", "--core_type=dummy", "--seed", "1", "2"]
    )
    found = [point.args for point in grid_points(grid)]
    assert len(found) == 4
    assert found[1] == ("--max_batch_size=4", "--save_outputs", "--core_type=dummy", "--seed=2")
    assert [dict(point.values) for point in grid_points(grid)][2] == {"max_batch_size": "8", "seed": "1"}
    assert len({point.folder for point in grid_points(grid)}) == 4


def test_a_point_is_found_again_in_a_larger_grid(tmp_path: Path) -> None:
    """Its name has the varied options, and is another one when a second option is varied."""
    first, second = (
        [*grid_points(grid_of_args(["--max_batch_size", "4", "8", "--max_output_len", *lengths]))]
        for lengths in (["8"], ["8", "32"])
    )
    for point in first:
        assert point.directory(tmp_path) == tmp_path / point.folder
        whole = {"loadgen_result": "VALID", "samples_per_second": 2.0, "tokens_per_second": 9.0}
        make_run(tmp_path / point.folder, result=whole)
    found = [point.directory(tmp_path).name for point in second]
    assert found == [first[0].folder, second[1].folder, first[1].folder, second[3].folder]
    (tmp_path / first[0].folder / "result.json").write_text("{")
    assert second[0].directory(tmp_path) == tmp_path / second[0].folder


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["ttft:500", "tpot:50"], ["ttft:500 tpot:50"]),
        (["ttft:500", "ttft:900"], ["ttft:500", "ttft:900"]),
        (["ttft:500,tpot:50", "ttft:900,tpot:90"], ["ttft:500,tpot:50", "ttft:900,tpot:90"]),
        (["ttft:500", "tpot:fast"], ["ttft:500", "tpot:fast"]),
    ],
)
def test_words_that_are_one_value_are_not_varied(args: list[str], values: list[str]) -> None:
    """As `run` takes them: each limit was a point of its own."""
    assert grid_of_args(["--goodput", *args]) == {"goodput": values}


def test_a_yaml_and_its_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        "max_batch_size: [4, 8]\ncore_options: [{ttft_ms: 1}, {ttft_ms: 2}]\nsave_outputs: true\n"
    )
    grid = grid_of_yaml(file)
    assert grid == {
        "max_batch_size": ["4", "8"],
        "core_options": ["ttft_ms:1", "ttft_ms:2"],
        "save_outputs": ["true"],
    }
    for text, message in (("- 4", "expected options"), ("a: [", "grid.yaml"), ("", "expected options")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            grid_of_yaml(file)
    with pytest.raises(ConfigError, match="No such file"):
        grid_of_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--core_type", "dummy"], "no option has several values"),
        (["4", "8"], "expected options of run"),
        (["--seed", "1", "--seed", "2"], "--seed is named twice"),
        (["--core_type", "dummy", "--max_batch_size", "4", "many"], "max_batch_size"),
        (["--core_type", "dummy", "--max_batch_sizes", "4", "8"], "unknown option --max_batch_sizes"),
    ],
)
def test_a_wrong_grid_starts_nothing(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "-n", "2", *args]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.out == ""


def test_only_runs_with_a_verdict_are_finished(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"loadgen_result": "VALID", "samples_per_second": 2.0, "tokens_per_second": 9.0}
    assert finished(make_run(tmp_path / "done", result=whole)) is not None
    failed = make_run(tmp_path / "failed", result={"status": "FAILED"})
    cut = make_run(tmp_path / "cut", result=whole)
    (cut / "result.json").write_text("{")
    damage: tuple[dict[str, Any], ...] = (
        {"tokens_per_second": "x"},
        {"samples_per_second": "x"},
        {"tpot_ms": 7},
        {"tpot_ms": {"mean": "x"}},
        {"ttft_ms": {"p99": []}},
    )
    damaged = [make_run(tmp_path / f"damaged-{i}", result=whole | one) for i, one in enumerate(damage)]
    assert {finished(path) for path in (failed, cut, tmp_path / "none", *damaged)} == {None}


@pytest.mark.parametrize(
    ("ranks", "config", "per", "of"),
    [
        ([{"device": 0}, {"device": 1}], {}, 6.0, "GPU"),
        ([{"device": None}, {"device": None}], {}, 6.0, "GPU"),  # a library that takes GPUs by itself
        ([{"device": None, "server_devices": [0, 1, 2]}, {"device": None}], {}, 4.0, "GPU"),
        ([{"device": None}, {"device": None}], {"trtllm_server_urls": ["h:1"]}, 6.0, "rank"),
    ],
)
def test_throughput_is_divided_by_the_gpus_that_compute(
    tmp_path: Path, ranks: list[dict[str, Any]], config: dict[str, Any], per: float, of: str
) -> None:
    result = {"loadgen_result": "VALID", "samples_per_second": 2.0, "tokens_per_second": 12.0}
    run = make_run(tmp_path / "run", result=result | {"compiled": []}, **config)
    ranks = [{"rank": i, "instance": i, "node": "n0", **one} for i, one in enumerate(ranks)]
    write(run / "plan.json", {"world_size": 2, "ranks": ranks})
    found = figures(RunFiles.read(run))
    assert (found["tokens_per_second_per_gpu"], found["of"]) == (per, of)


def test_a_point_has_the_figures_of_conversations(tmp_path: Path) -> None:
    turns = {"ttft_ms": {"mean": 5.0, "p90": 7.0}, "cached_share": 0.75}
    of = {"first_turns": turns, "later_turns": turns | {"ttft_ms": None}, "e2e_avg_interactivity": 40.0}
    result = {"status": "MEASURED", "samples_per_second": 2.0, "tokens_per_second": 12.0, "conversations": of}
    run = finished(make_run(tmp_path / "run", result=result | {"goodput": {"good_conversations_share": 0.5}}))
    assert run is not None
    found = figures(run)
    assert (found["first_turns_ttft_p90_ms"], found["later_turns_ttft_p90_ms"]) == (7.0, None)
    assert (found["cached_share"], found["e2e_avg_interactivity"]) == (0.75, 40.0)
    assert found["good_conversations_share"] == 0.5 and found["e2e_normalized_interactivity_p90"] is None
    for window, per_second in (((3.0, 30.0), 30.0), ((None, None), 12.0)):  # an empty window has no rates
        rates = dict(zip(("requests_per_second", "tokens_per_second"), window, strict=True))
        path = make_run(tmp_path / f"{per_second}", result=result | {"conversations": of | rates})
        assert figures(RunFiles.read(path))["tokens_per_second"] == per_second
    for damage in ({"conversations": 3}, {"conversations": of | {"cached_share": "x", "later_turns": 4}}):
        assert finished(make_run(tmp_path / f"{len(str(damage))}", result=result | damage)) is None


def test_the_front_has_what_nothing_beats() -> None:
    def point(per_user: float | None, per_gpu: float) -> dict[str, Any]:
        return {"tokens_per_second_per_user": per_user, "tokens_per_second_per_gpu": per_gpu}

    found = [point(10, 100), point(20, 80), point(15, 70), point(5, 100), point(40, 10), point(None, 500), {}]
    assert pareto(found) == [0, 1, 4]
