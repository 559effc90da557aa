"""Power from NVML: what it is a measurement of, and what a draft of system_power.json lacks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from mpillm.cli import main
from mpillm.devices import Gpu
from mpillm.experiments.bench.bench_endpoint import null_server
from mpillm.submission import power
from mpillm.submission.commands import endpoints_submission
from mpillm.telemetry.gpu_meter import GpuMeter


class Meter:
    """A GPU that uses a joule between two reads."""

    def __init__(self, joules: float = 0.0) -> None:
        self._joules = joules

    def read(self) -> Sequence[float]:
        self._joules += 1.0
        return (700.0, self._joules, 0.0, 0.0, 0.0, 0.0, 0.0)


def meters(*joules: float) -> list[GpuMeter]:
    return [cast(GpuMeter, Meter(one)) for one in joules]


def gpus(n: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(f"GPU-{i}", "NVIDIA B200", 180 << 30, 0) for i in range(n))


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("localhost:8000", True),
        ("http://127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("https://node7:8000", False),
        ("10.0.0.1:8000", False),
        ("http://[", False),
    ],
)
def test_only_this_host_is_measured(url: str, local: bool) -> None:
    assert power.is_local(url) is local
    if not local:
        assert power.local_meters(url) == []


def test_the_mean_is_that_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((10.0, 12.0))
    monkeypatch.setattr("mpillm.submission.power.time.monotonic", lambda: next(times))
    result = power.PowerWatch(meters(5.0, 100.0, 0.0)).result()
    assert result is not None
    assert (result["gpus"], result["mean_w"]) == (3, 1.5), "three joules in two seconds"
    assert result["source"].startswith("NVML")


def test_without_an_energy_counter_there_is_no_power() -> None:
    assert power.PowerWatch(meters(1.0, math.nan)).result() is None
    assert power.PowerWatch([]).result() is None


def test_a_draft_has_what_nvml_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "visible_gpus", lambda: gpus(8))
    description = {"node_types": [{"system_node_ensemble_id": 3, "cooling": "Liquid-cooled"}]}
    draft = power.power_draft("Box", description)
    assert draft is not None and draft["cooling"] == "liquid" and draft["system_desc_id"] == "Box"
    (node,) = draft["node_sets"]
    assert node["system_node_ensemble_id"] == 3 and node["power_method"] == "component_sum"
    assert node["components"]["accelerator"] == {"model": "NVIDIA B200", "count_per_node": 8}
    assert node["components"]["cpu"]["count_per_node"] >= 1
    assert "value_w" not in json.dumps(draft), "no figure without a public source"
    line = power.draft_line(draft)
    assert "a draft from NVML (8x NVIDIA B200)" in line and "the scale-up network" in line
    monkeypatch.setattr(power, "visible_gpus", lambda: gpus(1))
    single = power.power_draft("Box", {"node_types": "?"})
    assert single is not None and single["cooling"] == "air"
    assert single["node_sets"][0]["components"]["scale_up_network"] == {"method": "none"}
    assert "the scale-up network" not in power.draft_line(single)
    for nothing in (None, ()):
        monkeypatch.setattr(power, "visible_gpus", lambda nothing=nothing: nothing)
        assert power.power_draft("Box", {}) is None


def test_a_curve_has_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "visible_gpus", lambda: gpus(1))
    monkeypatch.setattr(endpoints_submission, "local_meters", lambda url: meters(0.0))
    words = ["endpoints-submission", "--benchmarks", "llama3.1-8b", "--model_scale", "tiny"]
    words += ["--submitter", "Us", "--system_name", "Box", "--output", str(tmp_path / "made")]
    words += ["--max_supported_concurrency", "48", "--concurrency", "1,48", "--min_duration", "0.01"]
    results = tmp_path / "made/Us/1/results/Box"
    file = results / "system_power.json"

    def written() -> dict[str, Any]:
        content: dict[str, Any] = json.loads(file.read_text())
        return content

    with null_server() as url:
        command = [*words, "--url", url]
        assert main(command) == 0
        out = capsys.readouterr().out
        assert out.count(" W (NVML)") == 2
        assert "yours       system_power.json: a draft from NVML (1x NVIDIA B200)" in out
        point = yaml.safe_load((results / "llama3_1-8b" / "r48" / "point.yaml").read_text())
        assert point["measured_power"]["gpus"] == 1 and point["measured_power"]["mean_w"] > 0
        assert written()["notes"].startswith("Draft by mpillm")
        # Only the Standardized division needs the file; the submitter's own one stays.
        assert main([*command, "--division", "RDI"]) == 0 and not file.exists()
        (tmp_path / "power.json").write_text('{"system_desc_id": "Box"}')
        assert main([*command, "--system_power", str(tmp_path / "power.json")]) == 0
        assert main(command) == 0 and written() == {"system_desc_id": "Box"}
