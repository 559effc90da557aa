"""A configuration of MLCommons' client in the place of ours is named, with the options that stand for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.errors import ConfigError
from mpillm.options.options import parse_run
from mpillm.programs.load_clients.client_files import is_client_file
from mpillm.programs.load_clients.inference_endpoint import config
from mpillm.programs.load_clients.kind import LoadSpec, PromptSample, Seeds
from mpillm.programs.load_clients.kinds import kind_of

TEXT = """
name: "online"
type: "online"
model_params: {name: "meta-llama/Llama-3.1-8B-Instruct", temperature: 0.0, max_new_tokens: 128}
datasets: [{name: cnn, type: performance}]
settings:
  runtime: {min_duration_ms: 600000, n_samples_to_issue: 13368}
  load_pattern: {type: concurrency, target_concurrency: 128}
endpoint_config: {endpoints: ["http://localhost:8000"]}
"""
WITHOUT_SETTINGS = TEXT[: TEXT.index("settings:")] + TEXT[TEXT.index("endpoint_config:") :]
OPTIONS = (
    "run the client with --harness inference-endpoint --url http://localhost:8000"
    " --model_path meta-llama/Llama-3.1-8B-Instruct --max_output_len 128 --temperature 0.0"
)
OF_SETTINGS = " --concurrency 128 --min_query_count 13368"


@pytest.mark.parametrize("option", ["config_file", "disagg_config"])
@pytest.mark.parametrize(
    ("text", "options"), [(TEXT, OPTIONS + OF_SETTINGS), (WITHOUT_SETTINGS, OPTIONS)], ids=["all", "fewest"]
)
def test_a_configuration_of_the_client(tmp_path: Path, option: str, text: str, options: str) -> None:
    file = tmp_path / "client.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse_run([f"--{option}", str(file)])
    assert "a configuration of MLCommons' client (inference-endpoint), not of mpillm" in str(error.value)
    assert str(error.value).endswith(options)


def load(folder: Path, *args: str) -> LoadSpec:
    samples = [PromptSample([1], "a", 8, False)]
    return LoadSpec(
        ("http://h:1",), "m", "", folder, samples, [8], [False], [0], 5.0, None, 1.0, 0, 1.0, 0,
        Seeds(1, 2, 3), args=args,
    )  # fmt: skip


def test_what_is_written_for_the_client_is_recognised(tmp_path: Path) -> None:
    made = yaml.safe_load(yaml.safe_dump(config(load(tmp_path))))
    assert is_client_file(made)
    others: list[Any] = [None, [], {}, {"settings": []}, {"executors": {}}]
    for other in [*others, {"model_params": {}, "settings": {}}, {"model_params": {}, "datasets": []}]:
        assert not is_client_file(other)


@pytest.mark.parametrize(
    "args", [("--config", "mine.yaml"), ("--config=mine.yaml",), ("-c", "mine.yaml"), ("-cmine.yaml",)]
)
def test_another_configuration_among_its_arguments(tmp_path: Path, args: tuple[str, ...]) -> None:
    """The client refuses a second one, after half a minute."""
    kind = kind_of("inference-endpoint")
    assert kind.command(replace(load(tmp_path), args=("--mode", "perf")))
    with pytest.raises(ValueError, match=r"--harness_args -.*c.*: mpillm writes its configuration"):
        kind.command(load(tmp_path, *args))
