"""The seed sets that MLCommons publishes, and the cohorts in which results with them count."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import yaml

from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.experiments.bench.bench_endpoint import null_server
from mpillm.submission.seed_sets import PUBLISHED, Cohort, choose, next_cohort, read_seed_sets

# The form of MLCommons' seedset.yaml.
NEWER = """
cohort:
  version: 1.0
  cohort-id: 2026-11-C1
  seed_sets:                              # a submission selects exactly one, by id
    - id: B
      scheduler_rng_seed:    11
      sample_index_rng_seed: 12
      model_seed:            13
"""


def written(folder: Path, text: str) -> str:
    (folder / "seedset.yaml").write_text(text)
    return str(folder / "seedset.yaml")


def test_cohorts_are_the_first_and_third_wednesdays() -> None:
    """The dates of MLCommons' submission rules, 4.5."""
    days = [(2026, 10, 21), (2026, 11, 4), (2026, 11, 18), (2026, 12, 2), (2026, 12, 16), (2027, 1, 6)]
    cohort = Cohort.of("2026-10-C1")
    for day in days:
        assert cohort.day == date(*day)
        assert Cohort.of(str(cohort)) == cohort
        cohort = cohort.next()
    assert [str(next_cohort(date(2026, 12, day))) for day in (1, 2, 16)] == [
        "2026-12-C0",
        "2026-12-C1",
        "2027-01-C0",
    ]


@pytest.mark.parametrize("text", ["2026-13-C0", "2026-00-C0", "2026-12-C2", "2026-12", "0000-01-C0", "", "A"])
def test_other_texts_are_not_cohorts(text: str) -> None:
    with pytest.raises(ValueError, match="expected a cohort"):
        Cohort.of(text)


def test_a_set_counts_in_its_cohort_and_the_next_three(tmp_path: Path) -> None:
    (newer,) = read_seed_sets(written(tmp_path, NEWER))
    assert newer.name == "B" and [*newer.seeds.values()] == [11, 12, 13]
    assert [str(cohort) for cohort in newer.cohorts] == [
        "2026-11-C1",
        "2026-12-C0",
        "2026-12-C1",
        "2027-01-C0",
    ]
    assert not newer.counts_in(Cohort.of("2026-11-C0")) and newer.counts_in(Cohort.of("2027-01-C0"))
    # Set A, which comes with mpillm, has the window of its publication.
    old = NEWER.replace("2026-11-C1", "2026-10-C1").replace("id: B", "id: A")
    assert read_seed_sets(written(tmp_path, old))[0].cohorts == PUBLISHED[0].cohorts


def test_other_forms_of_the_file(tmp_path: Path) -> None:
    """The older form without cohorts, and a set with its own cohorts; both are the checker's."""
    entry = yaml.safe_load(NEWER)["cohort"]["seed_sets"][0]
    (plain,) = read_seed_sets(written(tmp_path, yaml.safe_dump({"seed_sets": [entry]})))
    assert plain.cohorts == () and plain.counts_in(Cohort.of("2030-01-C0"))
    assert "cannot be checked" in plain.line(Cohort.of("2030-01-C0"))
    late = entry | {"id": "C", "cohorts": ["2027-01-C1", "2027-01-C0"]}
    both = {"cohort": {"cohort-id": "2026-11-C1", "seed_sets": [late, entry]}}
    sets = read_seed_sets(written(tmp_path, yaml.safe_dump(both)))
    assert [one.name for one in sets] == ["B", "C"], "the newest is the last"
    # Both count in 2027-01-C0: the newer one is the default. After both, it is the newest.
    for target, name in (("2026-12-C0", "B"), ("2027-01-C0", "C"), ("2028-01-C0", "C")):
        assert choose(sets, None, Cohort.of(target)).name == name
    assert choose(sets, "B", Cohort.of("2028-01-C0")).name == "B"
    with pytest.raises(ConfigError, match="--seed_set A: expected one of B, C"):
        choose(sets, "A", Cohort.of("2026-12-C0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed_sets: []", "expected cohort: "),
        ("- id: A", "expected cohort: "),
        ("", "expected cohort: "),
        (NEWER.replace("2026-11-C1", "November"), "November: expected a cohort"),
        (NEWER.replace("11\n", "eleven\n"), "scheduler_rng_seed: eleven; expected an integer"),
        (NEWER.replace("11\n", "-1\n"), "scheduler_rng_seed: -1; expected an integer"),
        (NEWER.replace("11\n", "true\n"), "scheduler_rng_seed: True; expected an integer"),
        (NEWER.replace("      model_seed:            13\n", ""), "model_seed: None; expected"),
        (NEWER.replace("id: B", "id: 7"), "expected a mapping with id"),
        (NEWER + "      cohorts: 2026-12-C0\n", "expected a list of cohorts"),
        (NEWER + NEWER[NEWER.index("    - id") :], "several sets are named B"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_seed_sets(path)
    assert message in str(error.value) and str(error.value).startswith(f"--seed_sets {path}")


def test_points_are_measured_with_the_sets_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`point.yaml` has the seeds. The command names the cohorts, and keeps points with other seeds apart."""
    words = [
        "--benchmarks",
        "llama3.1-8b",
        "--model_scale",
        "tiny",
        "--submitter",
        "Us",
        "--system_name",
        "Box",
    ]
    words += ["--max_supported_concurrency", "48", "--concurrency", "1,48", "--min_duration", "0.01"]
    words += ["--output", str(tmp_path / "made")]
    path = written(tmp_path, NEWER)
    with null_server() as url:
        command = ["endpoints-submission", *words, "--url", url]
        newer = [*command, "--seed_sets", path, "--target_cohort", "2026-12-C1"]
        assert main(newer) == 0
        out = capsys.readouterr().out
        assert (
            "seed set    B: a new submission counts in 2026-11-C1, 2026-12-C0, 2026-12-C1, 2027-01-C0" in out
        )
        assert "(until 2027-01-06); target 2026-12-C1\n" in out
        assert (
            f"check it    MLPERF_ENDPOINTS_SEED_SETS={path} endpoints-submission-cli check-submission" in out
        )
        point = yaml.safe_load((tmp_path / "made/Us/1/results/Box/llama3_1-8b/r48/point.yaml").read_text())
        assert (point["seed_set"], point["target_cohort"]) == ("B", "2026-12-C1")
        assert [*point["runtime_settings"]["runtime"].values()] == [11, 12, 13]
        assert main(newer) == 0 and capsys.readouterr().out.count("measured earlier") == 2
        written(tmp_path, NEWER.replace("12\n", "14\n"))
        assert main(newer) == 2
        assert "was measured with other seeds of set B" in capsys.readouterr().err
        assert main([*command, "--target_cohort", "2026-12-C1"]) == 2
        streams = capsys.readouterr()
        assert "was measured with --seed_set B, this is A" in streams.err
        assert "but not in the target 2026-12-C1. The checker rejects it" in streams.out
        assert main([*command, "--target_cohort", "soon"]) == 2
        assert "YYYY-MM-C0 or YYYY-MM-C1" in capsys.readouterr().err
