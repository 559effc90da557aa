"""From a model to a result with the torch core, by the commands of docs/howto/pipeline.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.make_folder import make_folder
from tests.helpers.support import CHUNKED, DONE, USAGE, Starter

pytest.importorskip("torch")

from tests.helpers.presets import save_preset

ARGS = (
    "--core_type=torch --model_path=llama --llm_quantizer_outdir=checkpoint --engine_dir=engine"
    " --trtllm_checkpoint_flags=qformat:int8_wo"
    " --trtllm_runtime_flags=enable_chunked_context:true"
)
RUN = (
    "--tensor_parallelism=2 --min_query_count=4 --max_output_len=4 --world_size=3 --log_dir=run"
    " --save_outputs"
)


def test_quantise_build_run(one: Starter, tmp_path: Path) -> None:
    make_folder(tmp_path)
    save_preset("tiny-llama", tmp_path / "llama")
    make_tokenizer(tmp_path / "llama")
    build = ["make", "generate_engines", f"RUN_ARGS={ARGS} --tensor_parallelism=2"]
    ended = one.command(build).end(120).must(DONE)
    assert ended.out.splitlines()[-1] == "engine"
    assert sorted(path.name for path in (tmp_path / "engine").glob("*.safetensors")) == [
        "rank0.safetensors",
        "rank1.safetensors",
    ]
    smaller = (tmp_path / "checkpoint/model.safetensors").stat().st_size / (
        tmp_path / "llama/model.safetensors"
    ).stat().st_size
    assert smaller < 0.5  # fp32 to int8, and what is not quantised
    assert one.command(build).end(60).must(DONE).out.count("is up to date") == 2

    one.command(["make", "run_harness", f"RUN_ARGS={ARGS} {RUN}"]).end(120).must(DONE)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["loadgen_result"] in ("VALID", "INVALID") and result["samples"] == 4
    answers = [
        json.loads(line)["output_tokens"]
        for line in (tmp_path / "run/outputs.jsonl").read_text().splitlines()
    ]
    # The same tokens as from the quantised checkpoint without an engine.
    plain = one.run(
        2,
        "--model_path",
        tmp_path / "checkpoint",
        *RUN.split()[1:3],
        "--save_outputs",
        *CHUNKED,
        core="torch",
        log_dir=tmp_path / "plain",
    )
    assert answers == [line["output_tokens"] for line in plain.must(DONE).outputs()]

    # An engine for two ranks is none for one.
    ended = (
        one.command(
            [one.python, "-m", "mpillm", "run-harness", *ARGS.split(), "--world_size=2", "--log_dir=other"]
        )
        .end(60)
        .must(USAGE)
    )
    assert "engine: built for TP 2" in ended.err
