"""The options of a run: every one with a good and a bad value, spellings, and what must agree."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.config.disagg_yaml import disagg_config
from mpillm.config.options import RunConfig, parse_each, parse_run, parse_serve, run_name
from mpillm.configurator import DEFAULT as DEFAULT_ORIGIN
from mpillm.configurator import Found
from mpillm.configurator.command_line import Parser
from mpillm.configurator.parsers import (
    Secret,
    accuracy,
    at_least_one,
    boolean,
    flag_dict,
    fraction,
    grpc_ports,
    http_urls,
    length_of_a_test,
    natural,
    not_negative,
    port,
    port_or_any,
    positive,
    rate,
    seconds,
    secret,
    stop_words,
    token_ids,
    urls,
)
from mpillm.cores.registry import check_core
from mpillm.fields import (
    BY_NAME,
    DEADLINES,
    FIELDS,
    batch_scheduler_policy,
    benchmarks,
    core_type,
    dataset,
    gpu_batch_size,
    scenarios,
)
from mpillm.run import in_turn

ROOT = Path(__file__).parents[3]
DUMMY = ["--core_type", "dummy"]

# By the function that reads a value: good texts with their values, and bad texts.
TEXTS: dict[Any, tuple[dict[str, Any], list[str]]] = {
    positive: ({"1": 1, "07": 7}, ["0", "-1", "1.5", "", "one", "1_000", "\u0661", "2147483648", "9" * 5000]),
    natural: ({"0": 0, "7": 7}, ["-1", "0.5", "", "none", "1_0", "\u0663", "2147483648"]),
    seconds: (
        {"1": 1.0, "0.5": 0.5, "1e3": 1000.0, "90s": 90.0, "10min": 600.0, "1.5h": 5400.0, "500 ms": 0.5},
        ["0", "-1", "inf", "1e300", "nan", "", "1_0", "s", "0ms", "5m", "5 S", "1h30min", "1e9min"],
    ),
    length_of_a_test: (
        {
            "0": 0.0,
            "600": 600.0,
            "600s": 600.0,
            "10min": 600.0,
            "600000ms": 600.0,
            "1.5ms": 0.0015,
            "86400": 86400.0,
            "24h": 86400.0,
        },
        ["-1", "inf", "1e300", "nan", "", "ms", "-1ms", "1d", "86401", "25h", "600000", "86400001ms"],
    ),
    rate: ({"0.5": 0.5, "1e9": 1e9}, ["0", "-1", "inf", "nan", "", "1_0", "1e10", "\u0663"]),
    not_negative: ({"0": 0.0, "2.5": 2.5}, ["-0.1", "inf", "nan", "", "x", "1_0.5"]),
    at_least_one: ({"1": 1.0, "128.5": 128.5}, ["0", "0.9", "-1", "inf", "nan", ""]),
    fraction: ({"1": 1.0, "0.1": 0.1}, ["0", "1.01", "-1", "nan", "all"]),
    boolean: (
        {"true": True, "False": False, "1": True, "0": False, "yes": True, "no": False},
        ["2", "maybe"],
    ),
    flag_dict: (
        {
            "": {},
            "a:1": {"a": 1},
            "a:true,b:x:y,c:0.5": {"a": True, "b": "x:y", "c": 0.5},
            "a:nan,b:1_000,c:1e999": {"a": "nan", "b": "1_000", "c": "1e999"},
        },
        ["a", ":1", "a:", "a:1,b", "a:1,", "a:1,,b:2", ",", "a:1,b:2,a:2"],
    ),
    stop_words: (
        {"###": ["###"], "a, b": ["a, b"], '["\\n\\n", [13, 13], "x"]': ["\n\n", [13, 13], "x"]},
        [
            "",
            "[",
            '["a"',
            "[1]",
            "[[]]",
            '[""]',
            '[["a"]]',
            "[[1.5]]",
            "[[true]]",
            "[[-1]]",
            "[[2147483648]]",
            "[" * 100000,
        ],
    ),
    benchmarks.from_string: (
        {
            "llama2-70b": ("llama2-70b",),
            "llama2,MOE": ("llama2-70b", "mixtral-8x7b"),
            "llama3_1-405b": ("llama3.1-405b",),
            "moe,mixtral-8x7b": ("mixtral-8x7b",),
            "llama2-99,llama2-70b-99.9": ("llama2-70b-99", "llama2-70b-99.9"),
        },
        [
            "",
            "llama4",
            "llama2,",
            "llama2;moe",
            "llama2-99.99",
            "llama2-70b-98",
            "moe-interactive",
            "llama2-70b-99-interactive",
        ],
    ),
    scenarios.from_string: (
        {
            "offline": ("Offline",),
            "Offline,SERVER": ("Offline", "Server"),
            "Server, singlestream": ("Server", "SingleStream"),
            "interactive,single-stream,single_stream": ("Interactive", "SingleStream"),
        },
        ["", "Multistream", "Offline,,Server"],
    ),
    token_ids: ({"2": (2,), "0,128009": (0, 128009)}, ["", "2,", "-1", "</s>", "1.5"]),
    port_or_any: ({"0": 0, " 0": 0, "1": 1, "65535": 65535}, ["", "00", "65536", "-1", "http"]),
    secret: ({"sesame": Secret("sesame")}, ["", " "]),
    port: ({"1": 1, "65535": 65535}, ["", "0", "65536", "-1", "http", "8_0", "\u0668\u0660"]),
    accuracy: (
        {".99": 0.99, "99.9": 0.999, "0.999": 0.999, "99": 0.99},
        ["0.9", "1", "99.99", "", "high", "nan"],
    ),
    dataset.from_string: (
        {"prompts": "prompts", "SYNTHETIC": "synthetic", "my.mod:Loader": "my.mod:Loader"},
        ["", "prompt", "my.mod"],
    ),
    core_type.from_string: (
        {
            "torch": "torch",
            "DUMMY": "dummy",
            "triton_grpc": "triton_grpc",
            "my.module:Class": "my.module:Class",
        },
        ["", "dumy", "torch,dummy", "torch "],
    ),
    batch_scheduler_policy.from_string: (
        {
            "max_util": "max_util",
            "No_Evict": "no_evict",
            "MAX_UTILIZATION": "max_util",
            "STATIC_BATCH": "static",
        },
        ["", "max", "evict", "max_util,no_evict"],
    ),
    gpu_batch_size.from_string: (
        {"2048": 2048, "llama2-70b:8,moe:16": {"llama2-70b": 8, "mixtral-8x7b": 16}},
        ["0", "", "a", "a:1", "moe:1,mixtral:2", "moe:0", "moe:b", ":4", "moe:1,4"],
    ),
    urls: (
        {"a:1,b:65535": ("a:1", "b:65535"), "[::1]:80": ("[::1]:80",)},
        ["", "a", "a:", ":1", "a:0", "a:65536", "a:1,b", "a:1,", "a:1,a:1", "http://a:1", "a b:1"],
    ),
    http_urls: (
        {"a:1,https://b:65535": ("a:1", "https://b:65535"), "http://a:1": ("http://a:1",)},
        ["", "a", "https://a", "ftp://a:1", "https://:1", "https://a:1/v1", "a:1,a:1"],
    ),
    grpc_ports: (
        {
            "foo:8001|bar:8003": {"foo": (8001,), "bar": (8003,)},
            "host_0:1,2|host_1:1,2": {"host_0": (1, 2), "host_1": (1, 2)},
        },
        ["", "a", "a:", "a:1|", "a:1|a:2", "a:1,1", "a:0", "a:65536", "a:x", "a:1,b:2"],
    ),
}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field.name))
def test_every_option(field: Any) -> None:
    if field.choices:
        for choice in field.choices:
            assert field.parse(choice, "--x") == field.parse(choice.upper(), "--x") == choice
        with pytest.raises(ConfigError) as error:
            field.parse(field.choices[0] + "x", f"--{field.name}")
        for word in (
            f"--{field.name} {field.choices[0]}x",
            "not one of",
            *field.choices,
            f"did you mean '{field.choices[0]}'?",
        ):
            assert word in str(error.value)
        return
    if field.from_string is None:
        assert field.parse("any text", "--x") == "any text"
        for empty in ("", " "):
            with pytest.raises(
                ConfigError, match=f"--{field.name} '{empty}': expected a text that is not empty"
            ):
                field.parse(empty, f"--{field.name}")
        return
    good, bad = TEXTS[field.from_string]
    for text, value in good.items():
        assert field.parse(text, "--x") == value
    for text in bad:
        with pytest.raises(ConfigError) as error:
            field.parse(text, f"--{field.name}")
        assert str(error.value).startswith(f"--{field.name} {text}: expected ")
        assert "``" not in str(error.value), "a docstring is no message"


def test_every_option_has_a_default_of_its_own_kind() -> None:
    config = parse_run(DUMMY)
    for field in FIELDS:
        assert (
            field.name in ("core_type", "trtllm_runtime_flags") or config.values[field.name] == field.default
        )
        assert config.source(field.name) == ("command line" if field.name == "core_type" else "default")
        assert field.choices == () or field.default in (None, *field.choices)
        assert not field.shown_default or field.parse(field.shown_default, "--x") == field.default
    assert len({name for field in FIELDS for name in (field.name, *field.aliases)}) == len(BY_NAME)
    assert len({field.name for field in FIELDS}) == len(FIELDS)
    assert {f"{phase}_deadline" for phase in DEADLINES} <= {field.name for field in FIELDS}


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_output_len", "5", "--save_outputs"],
        ["--max-output-len", "5", "--save-outputs"],
        ["--max-output-len=5", "--save-outputs=true"],
        ["--max_output_len=5", "--save_outputs", "yes"],
    ],
)
def test_hyphens_underscores_and_equals_signs(argv: list[str]) -> None:
    config = parse_run([*DUMMY, *argv])
    assert (config.max_output_len, config.save_outputs) == (5, True)
    assert config.given("max_output_len")
    assert not config.given("seed")


def test_of_an_option_that_is_given_twice_the_last_counts() -> None:
    assert parse_run([*DUMMY, "--seed", "1", "--seed=2"]).seed == 2
    assert parse_run([*DUMMY, "--models=llama2", "--benchmarks", "moe"]).benchmarks == ("mixtral-8x7b",), (
        "by whichever of its names"
    )


def test_values_keep_their_hyphens() -> None:
    config = parse_run([*DUMMY, "--log-dir=my-runs/a--b", "--model_path", "smol-lm"])
    assert (config.log_dir, config.model_path) == ("my-runs/a--b", "smol-lm")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field.name))
def test_every_misspelt_option_names_the_nearest(field: Any) -> None:
    wrong = f"--{field.name[:-2]}{field.name[-1]}{field.name[-2]}x"
    with pytest.raises(ConfigError) as error:
        parse_run([*DUMMY, wrong, "1"])
    assert f"unknown option {wrong}" in str(error.value)
    assert "did you mean '--" in str(error.value)


@pytest.mark.parametrize("wrong", ["--max_output", "--seeds", "--Seed", "-seed"])
def test_no_option_is_guessed(wrong: str) -> None:
    with pytest.raises(ConfigError, match="unknown option"):
        parse_run([*DUMMY, wrong, "1"])


def test_a_word_too_many() -> None:
    with pytest.raises(ConfigError, match="unknown option again"):
        parse_run([*DUMMY, "--seed", "1", "again"])


def test_a_missing_value() -> None:
    with pytest.raises(ConfigError, match="--seed"):
        parse_run([*DUMMY, "--seed"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--min_output_len", "9", "--max_output_len", "3"], ["--min_output_len 9", "--max_output_len 3"]),
        (["--dataset", "synthetic", "--dataset_path", "x"], ["--dataset_path", "exclude"]),
        (
            ["--context_chunking_policy", "equal_progress"],
            ["has no effect without --enable_chunked_context true"],
        ),
        (["--num_samples", "8"], ["--num_samples 8 has no effect without --dataset synthetic"]),
        (["--model_scale", "tiny"], ["--model_scale tiny has no effect without --benchmarks"]),
        (["--num_ctx_servers", "2"], ["--num_ctx_servers", "no meaning with mode aggregated (default)"]),
        (["--gen_tp_size", "2"], ["--gen_tp_size", "no meaning with mode aggregated (default)"]),
        (
            ["--mode", "disaggregated", "--tensor_parallelism", "2"],
            ["--tensor_parallelism", "no meaning with --mode disaggregated"],
        ),
        (["--core_type", "torch"], ["--model_path", "tiny-llama"]),
    ],
)
def test_options_that_do_not_go_together(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_core(parse_run([*DUMMY, *argv]))
    assert all(word in str(error.value) for word in words)


def test_a_test_of_days_is_refused_with_both_readings() -> None:
    """NVIDIA's field of the same name counts milliseconds."""
    with pytest.raises(ConfigError) as error:
        parse_run([*DUMMY, "--min_duration", "600000"])
    message = str(error.value)
    assert (
        "--min_duration 600000: expected a duration of at most a day, as 600s, 10min or 600000ms; a bare"
        " number is seconds" in message
    )
    assert (
        "600000 s are 6.94 days" in message
        and "600000 ms, as NVIDIA's min_duration counts, are 10 min: write 600000ms" in message
    )
    with pytest.raises(ConfigError, match=r"\(100h are 4.17 days\)"):
        parse_run([*DUMMY, "--min_duration", "100h"])
    for text, seconds_ in {"600000ms": 600, "10min": 600, "10": 10}.items():
        assert parse_run([*DUMMY, "--min_duration", text]).min_duration == seconds_
    assert parse_run([*DUMMY, "--load_deadline", "1h"]).load_deadline == 3600


def test_a_test_must_end_before_its_deadline() -> None:
    with pytest.raises(
        ConfigError,
        match=r"--min_duration 7200.0 must be less than --test_deadline 3600.0, which would end the"
        r" test first",
    ):
        parse_run([*DUMMY, "--min_duration", "2h", "--test_deadline", "1h"])
    assert parse_run([*DUMMY, "--min_duration", "2h", "--test_deadline", "3h"])


def test_the_digest_tells_configurations_apart(tmp_path: Path) -> None:
    yaml = tmp_path / "disagg.yaml"
    yaml.write_text("executors: {num_instances: 1}\n")
    argv = [*DUMMY, "--disagg_config", str(yaml)]
    first = parse_run(argv)
    assert first.digest() == parse_run(argv).digest()
    other = parse_run([*argv, "--seed", "4"])
    assert first.digest() != other.digest()
    assert first.difference(other.values) == "--seed is 4 there and 0 here"
    assert first.difference(parse_run(argv).values) == ""
    yaml.write_text("executors: {num_instances: 1, moe_config: {}}\n")
    assert parse_run(argv).digest() != first.digest()  # also in what is no option


def test_json_says_where_a_value_came_from() -> None:
    json = parse_run([*DUMMY, "--seed", "3"]).to_json()
    assert json["seed"] == {"value": 3, "source": "command line"}
    assert json["top_k"] == {"value": 0, "source": "default"}


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError):
        _ = RunConfig({"seed": Found(1, DEFAULT_ORIGIN)}).no_such_option  # type: ignore[attr-defined]


def test_run_names_are_file_names() -> None:
    assert run_name(parse_run([*DUMMY, "--scenarios", "Server"])) == "dummy-Server"
    assert run_name(parse_run(["--core_type", "my.mod:Core"])) == "my.mod_Core-Offline"
    assert run_name(parse_run([*DUMMY, "--model_path", "/models/Smol LM/"])) == "Smol_LM-Offline"


@pytest.mark.parametrize(
    ("options", "name"),
    [([], "Smol-Offline"), (["--benchmarks=moe", "--scenarios=Server"], "mixtral-8x7b-Server")],
)
def test_a_test_of_run_harness_is_named_as_its_run(options: list[str], name: str) -> None:
    """After the model where there is no benchmark."""
    config = parse_run([*DUMMY, "--model_path=/models/Smol", *options])
    assert (in_turn.test_of(config, [], False).name, run_name(config)) == (name, name)
    assert in_turn.test_of(config, [], False).log_dir.name.endswith(f"-{name}")
    config = parse_run([*DUMMY, "--model_path=/models/Smol", *options, "--log_dir=mine"])
    assert (in_turn.test_of(config, [], True).log_dir, in_turn.test_of(config, [], False).log_dir) == (
        Path("mine") / name,
        Path("mine"),
    )


def mpillm(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "mpillm", *words], env=env, capture_output=True, text=True, timeout=60, cwd=cwd
    )


def test_help_lists_every_option() -> None:
    shown = mpillm("run", "--help")
    assert shown.returncode == 0
    elsewhere = {"plan", "stages", "server", "serve", "checkpoint", "submission"}
    there = [f for f in FIELDS if f"--{f.name} " in shown.stdout or f"--{f.name}, " in shown.stdout]
    assert [f.name for f in FIELDS if (f in there) == (f.group in elsewhere)] == [
        "server_port",
        "worker_start_port",
    ]
    assert mpillm("--help").returncode == 0


@pytest.mark.parametrize("command", ["run", "plan", "generate-disagg-config"])
def test_examples_of_help_are_right(command: str, tmp_path: Path) -> None:
    """Every option that an example of --help shows is one, and its value is good."""
    shown = mpillm(command, "--help").stdout
    examples = re.findall(rf"python -m mpillm {command} (.*)", shown.partition("example")[2])
    assert examples
    for example in examples:
        words = [word.replace("DIR", "tiny-llama") for word in shlex.split(example)]
        if command == "run":
            assert parse_run(words)
        else:
            (tmp_path / "disagg.yaml").write_text(
                "context_servers: {num_instances: 3}\ngeneration_servers: {num_instances: 4}\n"
            )
            ended = mpillm(command, *words, cwd=tmp_path)
            assert ended.returncode == 0, ended.stderr


def test_help_has_units_and_defaults() -> None:
    shown = " ".join(mpillm("run", "--help").stdout.split())
    assert "phase load, seconds [default: 1800.0]" in shown
    assert (
        "LoadGen's scenario: Offline, Server, SingleStream; Interactive is Server with a workload's"
        " interactive form [default: Offline]" in shown
    )
    assert "--save_outputs [OUTPUTS] write every answer to outputs.jsonl [default: false]" in shown


def test_a_run_is_one_test() -> None:
    for option, value in (("scenarios", "Offline,Server"), ("benchmarks", "llama2,moe")):
        with pytest.raises(
            ConfigError, match=f"--{option} .*: a run is one test of one workload; start it once for each"
        ):
            parse_run([*DUMMY, f"--{option}={value}"])
    with pytest.raises(ConfigError, match="--dry_run true: `python -m mpillm plan`"):
        parse_run([*DUMMY, "--dry_run"])


def test_stages_take_each_workload_and_scenario() -> None:
    made = parse_each(
        ["--benchmarks=llama2,moe", "--scenarios=Offline,Server", "--seed", "3"],
        Parser(prog="mpillm x"),
        FIELDS,
    )
    pairs = [(config.benchmark, config.scenario) for config in made]
    assert pairs == [
        ("llama2-70b", "Offline"),
        ("llama2-70b", "Server"),
        ("mixtral-8x7b", "Offline"),
        ("mixtral-8x7b", "Server"),
    ]
    assert {config.seed for config in made} == {3}
    each = parse_each(
        ["--benchmarks=llama2,llama2-70b-interactive", "--model_scale=tiny"], Parser(prog="mpillm x"), FIELDS
    )
    # the default, and where there is no Offline
    assert [config.scenario for config in each] == ["Offline", "Server"]
    (alone,) = parse_each([], Parser(prog="mpillm x"), FIELDS)
    assert (alone.benchmark, alone.scenario) == (None, "Offline")


def test_other_names_of_options(tmp_path: Path) -> None:
    yaml = tmp_path / "x.yaml"
    yaml.write_text("executors: {}")
    config = parse_run([*DUMMY, "--models=llama2", "--trtllm_disagg_config_path", str(yaml)])
    assert (config.benchmarks, config.disagg_config) == (("llama2-70b",), str(yaml))
    assert config.source("models") == config.source("benchmarks") == "command line"
    assert config.given("trtllm_disagg_config_path")


def test_a_full_size_configuration() -> None:
    """All fields, and 8,192 worker ranks planned: docs/configuration.md says how long it takes."""
    config = parse_run(
        ["--core_type", "dummy", "--mode", "disaggregated", "--ctx_tp_size", "8", "--gen_tp_size", "8"]
    )
    plan = disagg.plan(disagg_config(config, 8194), 8194, [f"node{i // 8}" for i in range(8194)])
    assert len(plan.ranks) == 8194


def test_commands() -> None:
    wrong = mpillm("plam")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("mpillm: no command 'plam' (did you mean 'plan'?)")
    assert mpillm().returncode == 2


def test_bad_options_of_other_commands() -> None:
    wrong = mpillm("plan", "--world_sise", "4")
    assert wrong.returncode == 2
    assert "did you mean '--world_size'?" in wrong.stderr
    assert wrong.stdout == ""


def test_a_key_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in config.json, not where two ranks differ, and not by repr in a traceback."""
    monkeypatch.setenv("MPILLM_API_KEY", "sesame")
    config = parse_serve(DUMMY)
    assert config.api_key == Secret("sesame")
    assert "sesame" not in json.dumps(config.to_json()) + repr(config.values) + config.named("api_key")
    other = parse_serve([*DUMMY, "--api_key", "open"])
    assert other.api_key == Secret("open") and not {"open", "sesame"} & {
        *re.findall(r"\w+", other.difference(config.values))
    }
