"""TEST06: the settings, the three checks, and what the command leaves for the submission."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm import cli
from mpillm.loadgen.audit import prepare_audit
from mpillm.loadgen.logs import LoggedAnswer, read_answers
from mpillm.options.options import parse_run
from mpillm.submission.compliance_tests import check_test06, compliance_of
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.run_directories import log_entry, make_run, write

EOS = 2


def answer(
    tmp_path: Path, tokens: Sequence[int], first: Sequence[int] | None, count: int | None = None
) -> LoggedAnswer:
    write(tmp_path / "log.json", [log_entry(0, tokens, first, count)])
    return read_answers(tmp_path / "log.json")[0]


@pytest.mark.parametrize(
    ("tokens", "first", "count", "expected"),
    [
        ([5, 6, EOS], [5], None, (True, True, True)),
        ([5, 6, 7], [5], None, (True, True, True)),  # no end token: the answer was cut at its longest
        ([5, 6, EOS, EOS], [5], None, (True, False, True)),
        ([5, EOS, 6, EOS], [5], None, (True, True, True)),  # not both at the end
        ([EOS, EOS], [EOS], None, (True, True, True)),  # the first token is not looked at, as in the original
        ([EOS, EOS, EOS], [EOS], None, (True, False, True)),
        ([5, 6], [6], None, (False, True, True)),
        ([5, 6], None, None, (False, True, True)),
        ([5, 6], [], None, (False, True, True)),
        ([5, 6], [5], 3, (True, True, False)),
    ],
)
def test_checks(
    tmp_path: Path,
    tokens: list[int],
    first: list[int] | None,
    count: int | None,
    expected: tuple[bool, bool, bool],
) -> None:
    good = answer(tmp_path, [8, 9], [8])
    result = check_test06([good, answer(tmp_path, tokens, first, count), good], "Server", [EOS])
    checks = result.text.splitlines()[:3]
    assert tuple(line.endswith("check pass: True") for line in checks) == expected
    assert result.passed == all(expected)


def test_offline_has_no_first_tokens(tmp_path: Path) -> None:
    result = check_test06([answer(tmp_path, [5], None)], "Offline", [EOS])
    assert result.passed
    assert result.text.splitlines() == [
        "First token check pass: Skipped",
        "EOS check pass: True",
        "Sample length check pass: True",
        "TEST06 verification complete",
    ]


def test_any_end_token_counts(tmp_path: Path) -> None:
    result = check_test06([answer(tmp_path, [5, 128001, 128009], [5])], "Server", [128001, 128009])
    assert "EOS check pass: False" in result.text


def test_audit_config(tmp_path: Path) -> None:
    """LoadGen itself reads it: mode 2 is a performance run."""
    import mlperf_loadgen as lg

    file = prepare_audit("TEST06", None, tmp_path)
    settings = lg.TestSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.AccuracyOnly
    settings.sample_concatenate_permutation = True
    assert settings.FromConfig(file, "*", "Server", 2) == 0
    assert settings.mode == lg.TestMode.PerformanceOnly
    assert (settings.accuracy_log_sampling_target, settings.min_query_count, settings.min_duration_ms) == (
        100,
        100,
        0,
    )
    assert settings.accuracy_log_rng_seed == 720381539243781796
    assert not settings.sample_concatenate_permutation


@pytest.mark.parametrize(("name", "n"), [("TEST07", 990), ("TEST09", 6396)])
def test_audit_config_of_all_answers(name: str, n: int, tmp_path: Path) -> None:
    import mlperf_loadgen as lg

    settings = lg.TestSettings()
    settings.scenario = lg.TestScenario.Offline
    assert settings.FromConfig(prepare_audit(name, None, tmp_path), "*", "Offline", 2) == 0
    assert settings.performance_issue_unique and settings.min_query_count == n
    assert settings.mode == lg.TestMode.PerformanceOnly and settings.min_duration_ms == 0
    logged = {"effective_accuracy_log_sampling_target": settings.accuracy_log_sampling_target}
    assert compliance_of({**logged, "effective_test_mode": "PerformanceOnly"}) == name
    assert compliance_of({**logged, "effective_test_mode": "AccuracyOnly"}) is None
    assert f"min_query_count = {min(n, 12)}\n" in Path(prepare_audit(name, None, tmp_path, 12)).read_text()


@pytest.mark.parametrize(("tokens", "passed"), [(1150, False), (1151, True), (1406, True), (1407, False)])
def test_test09(tokens: int, passed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean length counts: one answer is longer, one shorter."""
    log = [log_entry(0, [7] * (tokens + 9)), log_entry(1, [7] * (tokens - 9))]
    run = make_run(tmp_path / "run", "TEST09", answers=log, benchmarks=["gpt-oss-120b"])
    assert cli.main(["compliance", str(run)]) == (0 if passed else 4)
    text = (run / "TEST09" / "verify_output_len.txt").read_text()
    assert f"Mean output tokens: {tokens}.00" in text and f"TEST {'PASS' if passed else 'FAIL'}" in text
    assert "TEST09: 2 answers" in capsys.readouterr().out
    for name in ("accuracy/mlperf_log_accuracy.json", "performance/run_1/mlperf_log_detail.txt"):
        assert (run / "TEST09" / name).read_bytes() == (run / Path(name).name).read_bytes()
    assert cli.main(["compliance", str(run), "--evaluated", "x"]) == 2
    assert "TEST09 takes no --evaluated" in capsys.readouterr().err


@pytest.mark.parametrize(("score", "passed"), [("60.697", False), ("60.698", True)])
def test_test07(score: str, passed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "TEST07", answers=[log_entry(0, [7])], benchmarks=["gpt-oss-120b"])
    assert cli.main(["compliance", str(run)]) == 2
    assert "TEST07 needs the output of the reference's evaluator" in capsys.readouterr().err
    printed = tmp_path / "printed.txt"
    printed.write_text(f"noise\n\n'exact_match': {score}\n")
    assert cli.main(["compliance", str(run), "--evaluated", str(printed)]) == (0 if passed else 4)
    text = (run / "TEST07" / "verify_accuracy.txt").read_text()
    assert f"'exact_match': {score}" in text and f"TEST {'PASS' if passed else 'FAIL'}" in text
    printed.write_text(f"{{'exact_match': '{score}'}}")  # as some evaluators print it
    assert cli.main(["compliance", str(run), "--evaluated", str(printed)]) == (0 if passed else 4)
    for nothing in ("Traceback", "'exact_match': ."):
        printed.write_text(nothing)
        assert cli.main(["compliance", str(run), "--evaluated", str(printed)]) == 2


def test_audit_config_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.config"
    own.write_text("*.*.min_query_count = 3\n")
    run = tmp_path / "run"
    run.mkdir()
    kept = prepare_audit(None, str(own), run)
    assert (Path(kept), Path(kept).read_text()) == (run / "audit.config", own.read_text())
    assert prepare_audit(None, kept, run) == kept
    assert prepare_audit(None, None, run) == "", "what an earlier run left there makes no compliance run"


def test_an_audit_config_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--audit_conf {tmp_path}: Is a directory"):
        prepare_audit(None, str(tmp_path), tmp_path)


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "TEST06", "Server", [log_entry(0, [5, EOS], [5])])
    with files_of_at_most(0):
        assert cli.main(["compliance", str(run)]) == 2
    assert "can't be written: File too large" in capsys.readouterr().err
    assert not (run / "TEST06" / "verify_accuracy.txt").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(
        tmp_path / "run", "TEST06", "Server", [log_entry(i, [5, 10 + i, EOS], [5]) for i in range(3)]
    )
    assert cli.main(["compliance", str(run)]) == 0
    verified = (run / "TEST06" / "verify_accuracy.txt").read_text()
    assert verified.endswith("TEST06 verification complete\n")
    assert verified in capsys.readouterr().out
    assert (
        json.loads((run / "TEST06" / "accuracy" / "mlperf_log_accuracy.json").read_text())[2]["qsl_idx"] == 2
    )
    assert cli.main(["compliance", str(run), "--end_ids", "9,1"]) == 0


def test_command_when_a_check_fails(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "TEST06", "Server", [log_entry(0, [5, EOS, EOS], [5])])
    assert cli.main(["compliance", str(run)]) == 4
    assert "EOS check pass: False" in (run / "TEST06" / "verify_accuracy.txt").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["performance"], "is not a compliance run: start one with --compliance_test TEST06"),
        (["empty"], "LoadGen logged no answer"),
        (["nowhere"], "no such run directory"),
        (["empty", "--end_ids", "2,x"], "--end_ids 2,x: expected token ids"),
        (["empty", "--end_idz", "2"], "unknown option --end_idz (did you mean '--end_ids'?)"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    make_run(tmp_path / "performance")
    make_run(tmp_path / "empty", "TEST06")
    assert cli.main(["compliance", str(tmp_path / argv[0]), *argv[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "empty" / "TEST06").exists()


def test_a_log_that_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    detail = make_run(tmp_path / "run", "TEST06") / "mlperf_log_detail.txt"
    detail.write_text("".join(detail.read_text().splitlines(keepends=True)[:2]))
    assert cli.main(["compliance", str(tmp_path / "run")]) == 2
    assert (
        f"{detail}: LoadGen's log is incomplete: it was cut before result_validity" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compliance_test", "TEST6"], "TEST06"),
        (
            ["--compliance_test", "TEST06", "--test_mode", "AccuracyOnly"],
            "is a performance run, not --test_mode AccuracyOnly",
        ),
        (["--compliance_test", "TEST06", "--audit_conf", __file__], "exclude each other"),
        (["--audit_conf", "/none"], "--audit_conf /none: no such file"),
    ],
)
def test_bad_options_of_run(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(["--core_type", "dummy", *options])
    assert message in str(error.value)
