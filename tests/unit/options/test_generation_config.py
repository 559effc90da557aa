"""A generation_config.json, the harness's or Hugging Face's, says how a run generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.nvidia.backends import HarnessConfig
from mpillm.options.generation_config import GenerationConfig
from mpillm.options.mitten import configured
from mpillm.options.options import parse_run


def test_a_generation_config_of_the_harness(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(
        json.dumps(
            {"generation_config": {"eos_token_id": 7, "max_output_len": 99, "top_p": 1, "unknown": []}}
        )
    )
    gen = GenerationConfig.from_file(path)
    assert (gen.eos_token_id, gen.max_output_len, gen.top_p, gen.top_k, gen.temperature) == (
        (7,),
        99,
        1,
        1,
        1.0,
    )


def test_a_generation_config_of_hugging_face(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(
        json.dumps({"eos_token_id": [2, 3], "max_new_tokens": 50, "temperature": 0.9, "top_p": 0.6})
    )
    gen = GenerationConfig.from_file(path)
    assert (gen.eos_token_id, gen.max_output_len, gen.temperature, gen.top_k, gen.top_p) == (
        (2, 3),
        50,
        0.0,
        0,
        1.0,
    ), "it is greedy"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.9, "top_p": 0.6}))
    gen = GenerationConfig.from_file(path)
    assert (gen.eos_token_id, gen.temperature, gen.top_k, gen.top_p) == ((), 0.9, 50, 0.6), (
        "50 is transformers' default"
    )


def test_what_a_generation_config_of_hugging_face_leaves_to_the_workload(tmp_path: Path) -> None:
    """In the harness's own file, what is missing has the harness's defaults; in Hugging Face's, the
    workload's."""
    path = tmp_path / "generation_config.json"
    argv = [
        "--core_type",
        "dummy",
        "--benchmarks",
        "mixtral-8x7b",
        "--model_scale",
        "tiny",
        "--llm_gen_config_path",
        str(path),
    ]
    path.write_text(json.dumps({"eos_token_id": 3, "max_new_tokens": None}))
    config = parse_run(argv)
    assert (config.end_ids, config.where("end_ids")) == ((3,), str(path))
    assert (config.min_output_len, config.where("min_output_len")) == (2, "workload mixtral-8x7b (tiny)")
    assert (config.max_output_len, bool(config.stop_words)) == (16, True)
    path.write_text(json.dumps({"generation_config": {"eos_token_id": 3}}))
    config = parse_run(argv)
    assert (config.min_output_len, config.max_output_len, config.where("max_output_len")) == (
        1,
        1024,
        str(path),
    )


@pytest.mark.parametrize(
    ("content", "count"),
    [({"use_stop_tokens": True}, True), ({"use_stop_tokens": False}, False), ({}, False)],
)
def test_use_stop_tokens(tmp_path: Path, content: dict[str, Any], count: bool) -> None:
    """`use_stop_tokens` sets whether the workload's stop words count, unless the user sets some."""
    path = tmp_path / "gen.json"
    path.write_text(json.dumps({"generation_config": content}))
    argv = [
        "--core_type",
        "dummy",
        "--benchmarks",
        "mixtral-8x7b",
        "--model_scale",
        "tiny",
        "--llm_gen_config_path",
        str(path),
    ]
    assert bool(parse_run(argv).stop_words) == count
    assert parse_run([*argv, "--stop_words", "###"]).stop_words == ["###"]


def test_a_run_uses_its_generation_config(tmp_path: Path) -> None:
    path = tmp_path / "gen.json"
    path.write_text(
        json.dumps(
            {
                "generation_config": {
                    "eos_token_id": [7, 8],
                    "max_output_len": 99,
                    "min_output_len": 3,
                    "top_k": 5,
                }
            }
        )
    )
    argv = ["--core_type", "dummy", "--llm_gen_config_path", str(path), "--top_k", "6"]
    config = parse_run(argv)
    assert (config.max_output_len, config.min_output_len, config.top_k) == (99, 3, 6)
    assert (config.where("max_output_len"), config.where("top_k")) == (str(path), "command line")
    assert configured(HarnessConfig, config).gen_config == GenerationConfig.from_file(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no such file"]),
        ("{", [":1: not valid JSON"]),
        ("[]", ["[]; must be an object"]),
        ('{"generation_config": 3}', ["3; must be an object"]),
        ('{"generation_config": {"max_output_len": "x"}}', ['max_output_len: "x"; must be a whole number']),
        ('{"generation_config": {"top_p": true}}', ["top_p: true; must be a number"]),
        (
            '{"generation_config": {"max_output_len": 0}}',
            ["max_output_len 0: expected a whole number of at least 1"],
        ),
        ('{"generation_config": {"top_p": 7}}', ["top_p 7: expected a number above 0 and up to 1"]),
        ('{"generation_config": {"temperature": NaN}}', ["temperature nan: expected a number of at least 0"]),
        ('{"generation_config": {"top_k": -1}}', ["top_k -1: expected a whole number of at least 0"]),
        (
            '{"generation_config": {"runtime_beam_width": 0}}',
            ["runtime_beam_width 0: expected a whole number of at least 1"],
        ),
        ('{"eos_token_id": [2, -1]}', ["eos_token_id 2,-1: expected token ids"]),
        ('{"eos_token_id": ["x"]}', ['eos_token_id: ["x"]; must be a whole number, or an array of them']),
    ],
)
def test_a_wrong_generation_config(tmp_path: Path, text: str | None, words: list[str]) -> None:
    path = tmp_path / "gen.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse_run(["--core_type", "dummy", "--llm_gen_config_path", str(path)])
    assert str(error.value).startswith(str(path))
    assert all(word in str(error.value) for word in words)
