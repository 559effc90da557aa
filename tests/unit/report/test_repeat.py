"""From a run directory back to its command; what is different is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm import cli
from mpillm.options.options import parse_run
from mpillm.report.repeat import options_again, repeated, user_options
from mpillm.report.run_environment import describe_environment, differences
from mpillm.report.run_files import RunFiles
from tests.helpers.run_directories import make_run

WORDS = ["--core_type", "dummy", "--core_options", "a:1", "--scenarios", "Server"]
WORDS += ["--server_target_qps", "5.0", "--seed", "3"]


def recorded(folder: Path, *words: str) -> Path:
    """Return a run directory with the config.json of a run with these options."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(parse_run(words).to_json()))
    return folder


def test_the_same_options(tmp_path: Path) -> None:
    words, notes = options_again(recorded(tmp_path / "run", *WORDS, "--log_dir", "x"))
    assert (sorted(words), notes) == (sorted(WORDS), [])


def test_a_single_argument_of_a_server_is_given_again(tmp_path: Path) -> None:
    words, notes = options_again(recorded(tmp_path / "run", "--server=vllm", "--server_args=--enforce-eager"))
    assert parse_run(words).server_args == ("--enforce-eager",) and notes == []


def test_names_that_mean_more_are_given_again(tmp_path: Path) -> None:
    """The accuracy target comes with a benchmark's name, and Interactive names another workload."""
    arguments = ["--core_type", "dummy", "--benchmarks", "llama3.1-8b", "--scenarios", "Interactive"]
    words, notes = options_again(recorded(tmp_path / "run", *arguments))
    assert "llama3.1-8b-interactive" in words and notes == []
    words = user_options(
        recorded(tmp_path / "other", "--core_type", "dummy", "--benchmarks", "llama2-70b-99.9")
    )
    assert words[words.index("--accuracy_target") + 1] == "0.999"


def test_options_of_the_environment_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "max_batch_size:9")
    run = recorded(tmp_path / "run", "--core_type", "dummy")
    monkeypatch.delenv("TRTLLM_RUNTIME_FLAGS")
    words, notes = options_again(run)
    assert parse_run(words).max_batch_size == 9 and notes == []


def test_a_changed_and_a_lost_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("core_type: dummy\nmax_batch_size: 4\n")
    run = recorded(tmp_path / "run", "--config_file", str(file))
    assert options_again(run) == (["--config_file", str(file)], [])
    file.write_text("core_type: dummy\nmax_batch_size: 8\n")
    words, notes = options_again(run)  # notes on its other names, too
    assert any(n.startswith(f"--max_batch_size 4 ({file}") and "here it would be 8" in n for n in notes)
    assert parse_run(words).max_batch_size == 4
    file.unlink()
    words, notes = options_again(run)
    assert f"--config_file {file} is missing: its values are added" in notes
    assert (parse_run(words).core_type, parse_run(words).max_batch_size) == ("dummy", 4)


def test_a_program_that_a_run_directory_names_is_not_run(tmp_path: Path) -> None:
    """Of a stranger's directory it would run even for --dry_run."""
    file = tmp_path / "theirs.py"
    file.write_text("core_type: dummy\nmax_batch_size: 4\n")
    run = recorded(tmp_path / "run", "--core_type", "dummy", "--max_batch_size", "4")
    config = json.loads((run / "config.json").read_text())
    config["config_file"] = {"value": str(file), "source": "command line"}
    config["max_batch_size"]["source"] = f"{file}:1"
    (run / "config.json").write_text(json.dumps(config))
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nEXPORTS = {{}}\n")
    words, notes = options_again(run)
    assert not (tmp_path / "ran").exists() and "--config_file" not in words
    assert f"--config_file {file} is a program, which is not run again: its values are added" in notes
    assert parse_run(words).max_batch_size == 4


def test_files_that_a_run_keeps(tmp_path: Path) -> None:
    conf = tmp_path / "mine.conf"
    conf.write_text("*.Offline.target_qps = 3\n")
    run = recorded(tmp_path / "run", "--core_type", "dummy", "--user_conf", str(conf))
    (run / "user.conf").write_text(f"# --user_conf {conf}\n*.Offline.target_qps = 3\n")
    assert options_again(run)[1] == []
    conf.write_text("*.Offline.target_qps = 4\n")
    words, (note,) = options_again(run)
    assert note == f"--user_conf {conf} has changed: {run}/user.conf is used"
    assert words[words.index("--user_conf") + 1] == str(run / "user.conf")
    conf.unlink()
    assert "is missing" in options_again(run)[1][0]


def test_a_data_set_that_was_made_for_the_run(tmp_path: Path) -> None:
    run = recorded(
        tmp_path / "run", "--core_type", "dummy", "--benchmarks", "llama3.1-8b", "--model_scale", "tiny"
    )
    config = json.loads((run / "config.json").read_text())
    config["dataset_path"]["value"] = str(run / "dataset")
    (run / "config.json").write_text(json.dumps(config))
    assert options_again(run)[1] == []


def test_another_version(tmp_path: Path) -> None:
    """A default that was another one is stated; an option that is no more is said."""
    run = recorded(tmp_path / "run", "--core_type", "dummy")
    config = json.loads((run / "config.json").read_text())
    config["max_output_len"]["value"] += 1
    config["no_such"] = {"value": 7, "source": "default"}
    (run / "config.json").write_text(json.dumps(config))
    words, notes = options_again(run)
    wanted = config["max_output_len"]["value"]
    assert notes == [
        "--no_such 7: this version has no such option",
        f"--max_output_len {wanted} (default) is added: here it would be {wanted - 1} (default)",
    ]
    assert parse_run(words).max_output_len == wanted


@pytest.mark.parametrize("yaml", [False, True])
def test_a_version_with_other_control_ranks(tmp_path: Path, yaml: bool) -> None:
    """The same ranks make the same instances again. With a YAML they do anyway."""
    words = ["--core_type", "dummy"]
    if yaml:
        (tmp_path / "d.yaml").write_text("executors: {num_instances: 2}")
        words += ["--disagg_config", str(tmp_path / "d.yaml")]
    run = recorded(tmp_path / "run", *words)
    made = disagg.plan(disagg.generate("aggregated", 4, control_ranks=2), 4)
    (run / "plan.json").write_text(json.dumps(made.to_json()))
    assert "control_ranks" not in repeated(RunFiles.read(run))[0]
    config = json.loads((run / "config.json").read_text())
    del config["control_ranks"]
    (run / "config.json").write_text(json.dumps(config))
    (run / "disagg.yaml").write_text("executors: {num_instances: 2}")
    again, notes = repeated(RunFiles.read(run))
    assert parse_run(again).control_ranks == (None if yaml else 2)
    assert any("--control_ranks 2 is added" in note for note in notes) == (not yaml)


def test_damaged_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run", "--core_type", "dummy")
    assert cli.main(["rerun", str(run), "--dry_run"]) == 2
    assert "neither result.json nor plan.json has the number of ranks" in capsys.readouterr().err
    (run / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json: damaged"):
        options_again(run)
    assert cli.main(["certify", str(run)]) == 2
    assert "no result of LoadGen, so there is nothing to certify" in capsys.readouterr().err
    assert cli.main(["rerun", str(tmp_path / "none")]) == 2


def test_figures_that_are_none_are_not_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before the test runs again."""
    result: dict[str, Any] = {"loadgen_result": "VALID", "samples": 9, "tokens": 9, "samples_per_second": 1.0}
    damaged: tuple[dict[str, Any], ...] = (
        {"tokens": "x"},
        {"samples": []},
        {"ttft_ms": {"p50": "x"}},
        {"samples_per_second": {}},
    )
    for i, damage in enumerate(damaged):
        run = make_run(tmp_path / f"{i}", result=result | damage)
        assert cli.main(["certify", str(run)]) == 2
        output = capsys.readouterr()
        assert f"{run}: damaged" in output.err or "nothing to certify" in output.err
        assert output.out == ""


def test_environments_are_compared() -> None:
    now = describe_environment("Open MPI v5.0.11")
    assert now["packages"]["numpy"] and now["python"] and differences(now, now) == []
    then = now | {
        "python": "3.9.1",
        "gpu_driver": None,
        "packages": now["packages"] | {"numpy": "1.0", "gone": "2"},
    }
    assert differences(then, now) == [
        f"python: 3.9.1 then, {now['python']} now",
        "gone: 2 then, none now",
        f"numpy: 1.0 then, {now['packages']['numpy']} now",
    ]


def test_a_secret_is_to_be_filled_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run directory has a mask in its place; a server with that for a key would refuse its clients."""
    run = make_run(tmp_path / "run")
    words = ["--server", "vllm", "--server_args", "--api-key sk-Zq81-abcdef --port 1"]
    config = parse_run(["--model_path", "m", *words]).to_json()
    (run / "config.json").write_text(json.dumps(config))
    assert "sk-Zq81" not in (run / "config.json").read_text()
    assert cli.main(["rerun", str(run)]) == 2
    assert "--server_args has a secret, which no run directory keeps" in capsys.readouterr().err
    assert cli.main(["rerun", str(run), "--dry_run"]) == 0
    assert "(secret)" in capsys.readouterr().out
