"""`rerun` and `certify` on the directory of a run, as a person types them."""

from __future__ import annotations

import json

from tests.helpers.support import DONE, Starter


def test_a_run_directory_is_enough(one: Starter) -> None:
    """The second run has the options of the first; certify's has a core that answers at once."""
    first = one.run(
        3,
        *("--benchmarks", "llama3.1-8b", "--model_scale", "tiny", "--core_options", "ttft_ms:400"),
        log_dir=one.folder / "first",
    ).must(DONE)
    environment = first.json("environment.json")
    assert (
        environment["packages"]["numpy"]
        and environment["mpi"] == first.json("ranks.json")[0]["versions"]["MPI"]
    )
    second = one.folder / "second"
    output = one.mpillm("rerun", first.log_dir, "--log_dir", second).must(DONE).out
    assert "nothing known is different from when the run was made" in output and "LoadGen" in output
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first.log_dir, second)]
    for name in ("log_dir", "dataset_path"):
        assert all(config.pop(name) for config in configs)
    assert configs[0] == configs[1]
    output = one.mpillm("certify", first.log_dir).must(DONE).out
    found = first.json("certificate.json")
    assert "harness alone" in output
    assert found["latencies"]["ttft_ms"]["p50"]["run"] == first.result["ttft_ms"]["p50"] >= 400
    alone, config = (
        json.loads((first.log_dir / "certify" / name).read_text()) for name in ("result.json", "config.json")
    )
    assert found["latencies"]["ttft_ms"]["p50"]["harness"] == alone["ttft_ms"]["p50"]
    assert found["samples_per_second"]["harness"] == alone["samples_per_second"]
    assert (config["core_options"]["value"], alone["tokens"]) == ({"output_mean": 2}, first.result["tokens"])
