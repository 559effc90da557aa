"""What is wrong behind sbatch's --: said before a job waits for its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpillm.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "--modle_path", "a"],
            "mpillm run: unknown option --modle_path (did you mean '--model_path'?)",
        ),
        (["run", "--max_batch_size", "many"], "max_batch_size many"),
        (["run", "--core_type=dummy", "--quantization=int8"], "has no effect on the dummy core"),
        (["run", "--config_file", "nowhere.yaml"], "nowhere.yaml"),
        (["serve", "--prot", "80"], "mpillm serve: unknown option --prot (did you mean '--port'?)"),
        (["run-harness", "--scenarios=Sever"], "Sever"),
        (["find-max-qps", "-n", "2", "--goodpt=ttft:5"], "unknown option --goodpt"),
    ],
)
def test_what_is_wrong_behind_the_dashes_makes_no_job(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sbatch", "--nodes", "1", "--", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
    assert not [*tmp_path.iterdir()]


def test_in_a_container_files_are_others_but_options_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    inside = ["sbatch", "--container_image", "image", "--dry_run", "--", "run"]
    assert main([*inside, "--config_file", "/in/the/image.yaml", "--model-path=a"]) == 0
    assert main([*inside, "--config_fil", "/in/the/image.yaml"]) == 2
    assert "unknown option --config_fil" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["bash", "script.sh"], ["doctor"], ["run", "--core_type=dummy"], ["serve", "--core_type=dummy"]]
)
def test_what_is_right_is_written(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sbatch", "--dry_run", "--", *words]) == 0
    assert " ".join(words) in capsys.readouterr().out
