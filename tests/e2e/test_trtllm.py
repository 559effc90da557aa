"""Whole runs through TensorRT-LLM's cores, against the stand-in: the import that every rank takes part in,
communicators, followers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.support import DONE, PYTHONS, ROOT, TEST_FAILED, Samples, Starter, make_samples

STAND_INS = {"PYTHONPATH": f"{ROOT / 'tests/helpers/stand_ins'}:{ROOT}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return what is read of an engine of two ranks, and of a Hugging Face folder."""
    build = {
        "max_batch_size": 4,
        "max_input_len": 512,
        "max_seq_len": 1024,
        "max_num_tokens": 512,
        "max_beam_width": 1,
    }
    engine = {
        "build_config": build,
        "pretrained_config": {"vocab_size": 32000, "mapping": {"tp_size": 2, "pp_size": 1}},
    }
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(
        json.dumps({**engine, "vocab_size": 32000, "max_position_embeddings": 1024, "eos_token_id": 31999})
    )
    return made


def options(core: str, folder: Path, samples: Samples) -> list[object]:
    engine = ["--engine_dir", folder] if core == "trtllm_executor" else []
    where = [*engine, "--model_path", folder, "--dataset_path", samples.path]
    return [*where, "--tensor_parallelism", 2, "--max_output_len", 6]


@pytest.mark.parametrize(
    ("core", "scenario", "instances", "mpi"),
    [
        ("trtllm_executor", "Offline", 2, "openmpi"),
        ("trtllm_executor", "Server", 1, "mpich"),
        ("trtllm_hlapi", "Offline", 1, "mpich"),
        ("trtllm_hlapi", "Server", 2, "openmpi"),
    ],
)
def test_a_run(core: str, scenario: str, instances: int, mpi: str, folder: Path, tmp_path: Path) -> None:
    if not PYTHONS[mpi]:
        pytest.skip("MPILLM_MPICH_PYTHON is not set: no environment with MPICH")
    samples = make_samples(tmp_path / "samples.jsonl", [1 + 7 * i % 193 for i in range(64)])
    starter = Starter(mpi, tmp_path)
    more = [
        "--scenarios",
        scenario,
        "--test_mode",
        "AccuracyOnly",
        "--save_outputs",
        *(["--server_target_qps", 500] if scenario == "Server" else []),
    ]
    try:
        ended = starter.run(
            1 + 2 * instances, *options(core, folder, samples), *more, core=core, env=STAND_INS, timeout=120
        ).must(DONE)
    finally:
        for command in starter.commands:
            command.kill()
    answers = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert answers == {index: prompt[::-1][:6] for index, prompt in enumerate(samples.prompts)}
    per_instance = ended.result["per_instance"]
    assert len(per_instance) == instances
    assert sum(one["samples"] for one in per_instance) == len(samples.prompts)


def test_a_request_that_the_library_refuses(one: Starter, folder: Path, tmp_path: Path) -> None:
    refused = Samples(tmp_path / "refused.jsonl", [[666, 3]])
    refused.path.write_text(json.dumps({"input_tokens": refused.prompts[0]}) + "\n")
    ended = one.run(
        3, *options("trtllm_hlapi", folder, refused), core="trtllm_hlapi", env=STAND_INS, timeout=120
    ).must(TEST_FAILED)
    assert "rank 1 (executor, instance 0)" in ended.message
    assert ": TensorRT-LLM, request 0: a prompt that this model refuses\n" in ended.message
