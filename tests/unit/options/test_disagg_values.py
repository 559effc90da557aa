"""The disaggregation YAML as a source of options: what it states holds, and contradicts nothing that a person
set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.errors import ConfigError
from disagg.schema import READ, SERVER
from mpillm.cli import main
from mpillm.cores.registry import check_core
from mpillm.options.disagg_values import CORE, EXPERTS, ROUTER, SIZES
from mpillm.options.disagg_yaml import disagg_config
from mpillm.options.options import parse_run
from mpillm.runtime.choose_samples import load_samples
from tests.helpers.configured import DUMMY
from tests.helpers.disagg_options import PLACES, TORCH, cores, given, section

# A value of each place that is not the default, in the YAML's words, and as an option has it.
VALUES: dict[str, tuple[Any, str]] = {
    "max_batch_size": (5, "5"),
    "max_num_tokens": (55, "55"),
    "max_seq_len": (555, "555"),
    "kv_cache_tokens": (640, "640"),
    "kv_cache_free_gpu_mem_fraction": (0.5, "0.5"),
    "tokens_per_block": (16, "16"),
    "enable_kv_cache_reuse": (True, "true"),
    "kv_host_cache_gb": (500_000_000, "0.5"),
    "enable_chunked_context": (True, "true"),
    "context_chunking_policy": ("EQUAL_PROGRESS", "equal_progress"),
    "enable_max_num_tokens_tuning": (True, "true"),
    "batch_scheduler_policy": ("STATIC_BATCH", "static"),
    "speculative_config": (
        {"decoding_type": "NGram", "max_draft_len": 4},
        "decoding_type:NGram,max_draft_len:4",
    ),
    "beam_width": (1, "1"),
    "dtype": ("bfloat16", "bfloat16"),
    "load_format": ("dummy", "dummy"),
    "kv_cache_dtype": ("fp8", "fp8"),
    "traffic_distribution_policy": ("round_robin", "round_robin"),
}
# Another one, as an option has it.
OTHERS = {
    "max_batch_size": "6",
    "max_num_tokens": "66",
    "max_seq_len": "666",
    "kv_cache_tokens": "320",
    "tokens_per_block": "8",
    "kv_cache_free_gpu_mem_fraction": "0.6",
    "enable_kv_cache_reuse": "false",
    "kv_host_cache_gb": "2.5",
    "enable_chunked_context": "false",
    "context_chunking_policy": "first_come_first_served",
    "enable_max_num_tokens_tuning": "false",
    "batch_scheduler_policy": "no_evict",
    "speculative_config": "decoding_type:NGram,max_draft_len:5",
    "beam_width": "2",
    "dtype": "float32",
    "load_format": "auto",
    "kv_cache_dtype": "bfloat16",
    "traffic_distribution_policy": "load_balancing",
}
LAYOUT = {
    "num_instances": 2,
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 2,
    "moe_expert_parallel_size": 2,
}


def test_every_key_of_a_section_that_is_read_is_an_option() -> None:
    """Exceptions are keys that say how TensorRT-LLM's servers are reached, and keys that are refused."""
    options = {
        place.key[0]
        for place in (*CORE, ROUTER, EXPERTS, *(place for places in SIZES.values() for place in places))
    }
    assert {*SERVER, *READ} - options == {"context_parallel_size", "cache_transceiver_config", "urls"}
    assert set(VALUES) == set(OTHERS) == set(PLACES)


@pytest.mark.parametrize("name", VALUES)
def test_what_a_section_states_holds_for_it(file: Path, name: str) -> None:
    value, option = VALUES[name]
    place = PLACES[name]
    config = given(file, executors=section(**{name: value}))
    expected = place.field.parse(option, name)
    assert getattr(config, name) == expected
    where = f"{file}: executors.{place.name}"
    assert config.to_json()[name] == {"value": expected, "source": where}
    _, (core,) = cores(config, 2)
    if place is not ROUTER:
        assert core.engine.values[name] == expected
    needed: dict[str, dict[str, Any]] = {
        "context_chunking_policy": {"enable_chunked_prefill": True},
        "kv_host_cache_gb": {"kv_cache_config": {"enable_block_reuse": True, "host_cache_size": value}},
    }
    more = needed.get(name, {})
    agreeing = given(file, f"--{name}", option, executors=section(**{name: value}) | more)
    assert (getattr(agreeing, name), agreeing.where(name)) == (expected, "command line")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("source", ["command line", "file"])
def test_an_option_that_contradicts_another_source_names_both(
    file: Path, tmp_path: Path, name: str, source: str
) -> None:
    value, _ = VALUES[name]
    options, expected = [f"--{name}", OTHERS[name]], f"--{name} {OTHERS[name]}"
    if source == "file":
        mine = tmp_path / "mine.yaml"
        mine.write_text(f"scenario: Offline\n{name}: {OTHERS[name]}\n")
        options, expected = ["--config_file", str(mine)], f"{name} {OTHERS[name]} ({mine}:2)"
    with pytest.raises(ConfigError) as error:
        given(file, *options, executors=section(**{name: value}))
    assert (
        str(error.value)
        == f"{expected}, but {file}: executors.{PLACES[name].name} is {value}: leave one of them out"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--trtllm_runtime_flags max_num_tokens:66",
            "max_num_tokens 66 (command line: trtllm_runtime_flags)",
        ),
        ("--gpu_batch_size 6", "max_batch_size 6 (command line: gpu_batch_size)"),
        (
            "--trtllm_runtime_flags use_inflight_batching:false",
            "batch_scheduler_policy static (command line: use_inflight_batching)",
        ),
    ],
)
def test_a_flag_that_contradicts_the_yaml_is_refused_like_its_option(
    file: Path, words: str, expected: str
) -> None:
    content = section(max_num_tokens=55, max_batch_size=5, batch_scheduler_policy="MAX_UTILIZATION")
    with pytest.raises(ConfigError) as error:
        given(file, *words.split(), executors=content)
    assert str(error.value).startswith(f"{expected}, but {file}: executors.")


def test_the_environment_is_a_person_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "max_num_tokens:77")
    with pytest.raises(
        ConfigError,
        match=r"max_num_tokens 77 \(environment variable TRTLLM_RUNTIME_FLAGS: trtllm_runtime_flags\), but",
    ):
        given(file, executors=section(max_num_tokens=55))


def test_a_bad_yaml_names_what_named_it(file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"core_type: dummy\ndisagg_config: {file}\n")
    with pytest.raises(ConfigError) as error:
        parse_run(["--config_file", str(mine)])
    assert (
        str(error.value)
        == f"{file}: cannot be read: No such file or directory\ndisagg_config is set by {mine}:2"
    )


def test_flags_have_the_values_of_the_yaml(file: Path) -> None:
    config = given(file, executors=section(max_num_tokens=55, enable_chunked_context=True))
    assert (
        config.trtllm_runtime_flags["max_num_tokens"],
        config.trtllm_runtime_flags["enable_chunked_context"],
    ) == (55, True)
    assert (
        config.to_json()["trtllm_runtime_flags"]["source"]["max_num_tokens"]
        == f"{file}: executors.max_num_tokens"
    )


def test_a_yaml_goes_before_a_workload_and_a_workload_before_a_default(file: Path) -> None:
    config = given(file, "--benchmarks", "llama2-70b", model="tiny-llama", executors=section(max_seq_len=555))
    assert (config.max_seq_len, config.max_num_tokens, config.model_path) == (555, 8192, "tiny-llama")
    assert config.where("max_num_tokens") == "workload llama2-70b"
    assert config.where("model_path") == f"{file}: model"


def test_a_yaml_goes_before_a_generation_config(file: Path, tmp_path: Path) -> None:
    generation = tmp_path / "generation.json"
    generation.write_text('{"generation_config": {"runtime_beam_width": 2}}')
    options = ("--llm_gen_config_path", str(generation))
    config = given(file, *options, executors=section(beam_width=3))
    assert (config.beam_width, config.where("beam_width")) == (3, f"{file}: executors.max_beam_width")
    assert given(file, *options, executors=section()).beam_width == 2
    with pytest.raises(
        ConfigError, match=r"--beam_width 4, but .*executors.max_beam_width is 3: leave one of them out"
    ):
        given(file, *options, "--beam_width", "4", executors=section(beam_width=3))


def test_what_is_generated_for_a_run_states_only_its_instances(capsys: pytest.CaptureFixture[str]) -> None:
    """The run's own values say how its instances run.

    A reader of generate-disagg-config's file has only the file.
    """
    words = [
        "--mode",
        "disaggregated",
        "--max_batch_size",
        "7",
        "--traffic_distribution_policy",
        "round_robin",
    ]
    made = disagg_config(parse_run([*DUMMY, *words]), 5)
    assert all(place.value_in(server) is None for _, server in made.sections for place in (*CORE, ROUTER))
    assert main(["generate-disagg-config", "--core_type=dummy", *words]) == 0
    written = disagg.parse(capsys.readouterr().out)
    assert [(server.max_batch_size, server.router["type"]) for _, server in written.sections] == [
        (7, "round_robin")
    ] * 2


def test_what_sections_have_alike_is_the_runs_and_the_rest_is_each_ones(file: Path) -> None:
    one, other = section(max_batch_size=5, max_num_tokens=55), section(max_batch_size=5, max_num_tokens=66)
    config = given(file, context_servers=one, generation_servers=other)
    assert config.max_batch_size == 5
    assert [config.in_section(name).max_num_tokens for name in ("context_servers", "generation_servers")] == [
        55,
        66,
    ]
    assert config.to_json()["max_num_tokens"] == {
        "value": {"context_servers": 55, "generation_servers": 66},
        "source": {
            name: f"{file}: {name}.max_num_tokens" for name in ("context_servers", "generation_servers")
        },
    }
    assert config.to_json()["max_batch_size"] == {
        "value": 5,
        "source": f"{file}: context_servers.max_batch_size",
    }
    _, made = cores(config, 3)
    assert [(core.role, core.engine.scheduler.max_num_tokens) for core in made] == [
        ("context", 55),
        ("generation", 66),
    ]
    with pytest.raises(ConfigError, match=r"--max_num_tokens 66, but .*context_servers.max_num_tokens is 55"):
        given(file, "--max_num_tokens", "66", context_servers=one, generation_servers=other)
    half = given(file, "--max_num_tokens", "66", context_servers={}, generation_servers=other)
    assert [core.engine.scheduler.max_num_tokens for core in cores(half, 3)[1]] == [66, 66]


def test_a_prompt_must_fit_every_section(file: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_tokens": [3] * 40}) + "\n")
    options = ["--benchmarks", "llama2-70b", "--dataset_path", str(prompts), "--max_output_len", "4"]
    for first, second in ((50, 40), (40, 50)):
        config = given(
            file,
            *options,
            context_servers=section(max_seq_len=first),
            generation_servers=section(max_seq_len=second),
        )
        with pytest.raises(
            ConfigError, match="40 tokens and does not fit max_seq_len 40 with max_output_len 4"
        ):
            load_samples(config, [None, None], lambda: tmp_path)
    config = given(
        file, *options, context_servers=section(max_seq_len=50), generation_servers=section(max_seq_len=60)
    )
    assert len(load_samples(config, [None, None], lambda: tmp_path)[0]) == 1


def test_ranks_with_different_yamls_get_both_values(file: Path) -> None:
    mine = given(file, executors=section(max_batch_size=5))
    theirs = given(file, executors=section(max_batch_size=6))
    assert mine.digest() != theirs.digest()
    assert (
        mine.difference(theirs.values)
        == f"--max_batch_size is 6 there and 5 here ({file}: executors.max_batch_size)"
    )


def test_the_layout_is_the_yamls(file: Path) -> None:
    config = given(file, context_servers=LAYOUT, generation_servers={})
    layout = {
        "num_ctx_servers": 2,
        "ctx_tp_size": 4,
        "ctx_pp_size": 2,
        "num_gen_servers": 1,
        "gen_tp_size": 1,
        "gen_pp_size": 1,
    }
    assert {name: getattr(config, name) for name in layout} == layout
    assert config.to_json()["mode"] == {"value": "disaggregated", "source": str(file)}
    same = ["--num_ctx_servers", "2", "--ctx_tp_size", "4", "--mode", "disaggregated"]
    assert (
        disagg_config(given(file, *same, context_servers=LAYOUT, generation_servers={}), 18).n_workers == 17
    )
    executors = given(file, executors=LAYOUT)
    assert (
        executors.mode,
        executors.tensor_parallelism,
        executors.pipeline_parallelism,
        executors.moe_expert_parallelism,
    ) == (*("aggregated", 4, 2, 2),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--ctx_tp_size 2",
            "--ctx_tp_size 2, but {file}: context_servers.tensor_parallel_size is 4: leave one of them out",
        ),
        (
            "--num_gen_servers 1",
            "--num_gen_servers 1, but {file}: generation_servers.num_instances is 2: leave one of them out",
        ),
        (
            "--moe_expert_parallelism 4",
            "--moe_expert_parallelism 4, but {file}: context_servers.moe_expert_parallel_size is 2: leave one"
            " of them out",
        ),
        ("--mode aggregated", "--mode aggregated, but {file} is disaggregated: leave one of them out"),
        ("--tensor_parallelism 4", "--tensor_parallelism 4 has no meaning with mode disaggregated ({file})"),
        ("--model_path other", "--model_path other, but {file}: model is tiny-llama: leave one of them out"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_contradiction_names_both(
    file: Path, capsys: pytest.CaptureFixture[str], command: str, words: str, message: str
) -> None:
    if command == "run":
        with pytest.raises(ConfigError) as error:
            given(file, *words.split(), model="tiny-llama", context_servers=LAYOUT, generation_servers=LAYOUT)
        assert str(error.value) == message.format(file=file)
    else:
        file.write_text(
            json.dumps({"model": "tiny-llama", "context_servers": LAYOUT, "generation_servers": LAYOUT})
        )
        assert main(["plan", "--disagg_config", str(file), *words.split()]) == 2
        assert message.format(file=file) in capsys.readouterr().err


def test_the_model_is_the_yamls(file: Path, tmp_path: Path) -> None:
    config = given(file, core=TORCH, model="tiny-llama", executors={})
    assert (config.model_path, config.where("model_path")) == ("tiny-llama", f"{file}: model")
    yaml, (core,) = cores(config, 2)
    assert core.engine.model_path == yaml.model == "tiny-llama"
    with pytest.raises(ConfigError, match="--core_type torch needs --model_path"):
        check_core(given(file, core=TORCH, executors={}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert (
        given(file, "--model_path", f"{tmp_path}/link/", model=f"{tmp_path}/folder", executors={}).model_path
        == f"{tmp_path}/link/"
    )
