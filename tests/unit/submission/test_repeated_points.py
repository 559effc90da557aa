"""Points of a curve that are measured again after an interruption or a failure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from mpillm.cli import main
from mpillm.experiments.bench.bench_endpoint import null_server
from mpillm.experiments.loadtest.endpoint_client import EndpointClient
from mpillm.experiments.loadtest.load_test import LoadTest
from mpillm.submission.fixed_concurrency import FixedConcurrency
from tests.helpers.mlcommons_client import install_client

WORDS = ("--benchmarks", "llama3.1-8b", "--model_scale", "tiny", "--submitter", "Us", "--system_name", "Box")
CURVE = "made/Us/1/results/Box/llama3_1-8b"


def command_of(tmp_path: Path, url: str) -> list[str]:
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    return ["endpoints-submission", *words, "--concurrency", "1,48", "--min_duration", "0.01", "--url", url]


def test_an_interrupted_test_has_used_its_salts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a prefix cache has the prompts of the interrupted test."""
    run = EndpointClient.run

    def interrupted(client: EndpointClient, test: LoadTest) -> float:
        if isinstance(test, FixedConcurrency) and test._salts:
            raise KeyboardInterrupt
        return run(client, test)

    with null_server() as url:
        command = command_of(tmp_path, url)
        monkeypatch.setattr(EndpointClient, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(command)
        monkeypatch.setattr(EndpointClient, "run", run)

        def salt_seed() -> str:
            assert main(command) == 0
            point = yaml.safe_load((tmp_path / CURVE / "r1" / "point.yaml").read_text())
            return str(point["runtime_settings"]["salt"]["seed"])

        first = salt_seed()
        assert first.endswith("/r1/2")
        shutil.rmtree(tmp_path / CURVE / "r1")  # as messages advise
        assert salt_seed().endswith("/r1/3")


def test_a_point_outlives_a_failed_measurement_by_mlcommons_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with null_server() as url:
        command = [*command_of(tmp_path, url), *install_client(tmp_path, monkeypatch)]
        assert main(command) == 0
        folder = tmp_path / CURVE / "r1"
        accuracy = folder / "accuracy_results.json"
        before = {file: file.read_bytes() for file in folder.iterdir() if file != accuracy}
        accuracy.unlink()  # so that the point is measured again
        install_client(tmp_path, monkeypatch, fails="Config error: no")
        assert main(command) == 1
        assert {file: file.read_bytes() for file in folder.iterdir()} == before
        install_client(tmp_path, monkeypatch)
        capsys.readouterr()
        assert main(command) == 0
        assert "concurrency 1  without its accuracy run" in capsys.readouterr().out
        assert json.loads(accuracy.read_text())
