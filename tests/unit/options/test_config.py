"""The options of a run: every one with a good and a bad value, and their spellings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.options.command_line import Parser
from mpillm.options.fields import BY_NAME, DEADLINES, FIELDS, AllFields
from mpillm.options.latency_limits import integer_limits_ms
from mpillm.options.options import parse_run, parse_serve
from mpillm.options.parsers import (
    Secret,
    accuracy,
    body_fields,
    boolean,
    flag_dict,
    fraction,
    gigabytes,
    grpc_ports,
    headers,
    http_urls,
    length_of_a_test,
    model_names,
    natural,
    not_negative,
    one_or_more,
    one_or_two,
    percent,
    port,
    port_or_any,
    positive,
    rate,
    seconds,
    secret,
    session_header,
    shape_of_gamma,
    shell_args,
    stop_words,
    token_ids,
    url_path,
    urls,
)
from mpillm.options.synthetic_conversations import synthetic_conversations
from mpillm.options.trace_columns import trace_columns
from mpillm.stages.stage_options import parse_each
from tests.helpers.configured import DUMMY

# By the function that reads a value: good texts with their values, and bad texts.
TEXTS: dict[Any, tuple[dict[str, Any], list[str]]] = {
    BY_NAME["harness"].from_string: (
        {"AIPerf": "aiperf", "command:x {url} {report}": "command:x {url} {report}"},
        ["aiprf", "", "command:x {url}"],
    ),
    BY_NAME["server"].from_string: (
        {"vllm": "vllm", "command:x {port}": "command:x {port}"},
        ["vlm", "", "command:x"],
    ),
    shell_args: ({"--a 'b c'": ("--a", "b c"), "": ()}, ["'"]),
    positive: ({"1": 1, "07": 7}, ["0", "-1", "1.5", "", "one", "1_000", "\u0661", "2147483648", "9" * 5000]),
    integer_limits_ms: (
        {
            "ttft:500": {"ttft": 500.0},
            "request_latency:9e3 tpot:50.0": {"e2el": 9000.0, "tpot": 50.0},
        },
        [
            "ttft",
            "ttft:",
            "500",
            "ttft:0",
            "ttft:-1",
            "ttft:0.5",
            "ttft:1_0",
            "ttft:nan",
            "ttft:1e9",
            "x:1",
            "",
        ],
    ),
    synthetic_conversations: (
        {
            "turns=2,delay=0.5-2": {
                "turns": "2",
                "input": "128",
                "output": "32",
                "delay": "0.5-2",
                "system": "0",
                "groups": "1",
                "prefix": "0",
                "zipf": "0",
            }
        },
        ["", "turns", "turns=0", "turns:2", "turn=2"],
    ),
    percent: ({"10": 10.0, "0.5": 0.5, "100": 100.0}, ["0", "-1", "101", "nan", "10%", ""]),
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
    one_or_more: ({"1": 1.0, "128.5": 128.5}, ["0", "0.9", "-1", "inf", "nan", ""]),
    body_fields: ({'{"a": [1]}': {"a": [1]}, "{}": {}}, ["[]", "a", '{"model": "m"}', '{"stream": true}']),
    headers: (
        {'{"X-A": "b c"}': {"X-A": "b c"}},
        ["[]", '{"Host": "a"}', '{"X A": "b"}', '{"X-A": 1}', '{"X-A": "b\\r\\nC: d"}'],
    ),
    url_path: (
        {"/": "/", "/a/b?c=d": "/a/b?c=d"},
        ["", "a", "/a b", "/\u00e9", "/" + 1001 * "a"],
    ),
    session_header: ({"X-Session-ID": "X-Session-ID", "X-Chat": "X-Chat"}, ["", "Host", "X A", "X:"]),
    model_names: ({"a": ("a",), "a, b:c": ("a", "b:c")}, ["", "a,", "a,a", "a\tb"]),
    trace_columns: (
        {"timestamp=T,input_length=Request tokens": {"timestamp": "T", "input_length": "Request tokens"}},
        ["", "timestamp", "timestamp=", "time=T", "timestamp=T,timestamp=T", "timestamp_unit=h"],
    ),
    shape_of_gamma: ({"1": 1.0, "0.25": 0.25, "inf": float("inf")}, ["0", "-1", "nan", "1001", "-inf"]),
    gigabytes: ({"0.5": 0.5, "64": 64.0}, ["0", "-1", "nan", "1e7", "64GB"]),
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
    AllFields.benchmarks.from_string: (
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
    AllFields.scenarios.from_string: (
        {
            "offline": ("Offline",),
            "Offline,SERVER": ("Offline", "Server"),
            "Server, singlestream": ("Server", "SingleStream"),
            "interactive,single-stream,single_stream": ("Interactive", "SingleStream"),
        },
        ["", "Multistream", "Offline,,Server"],
    ),
    one_or_two: ({"1": 1, "2": 2}, ["", "0", "3", "two", "1.0"]),
    token_ids: ({"2": (2,), "0,128009": (0, 128009)}, ["", "2,", "-1", "</s>", "1.5"]),
    port_or_any: ({"0": 0, " 0": 0, "1": 1, "65535": 65535}, ["", "00", "65536", "-1", "http"]),
    secret: ({"sesame": Secret("sesame")}, ["", " "]),
    port: ({"1": 1, "65535": 65535}, ["", "0", "65536", "-1", "http", "8_0", "\u0668\u0660"]),
    accuracy: (
        {".99": 0.99, "99.9": 0.999, "0.999": 0.999, "99": 0.99},
        ["0.9", "1", "99.99", "", "high", "nan"],
    ),
    AllFields.dataset.from_string: (
        {"prompts": "prompts", "SYNTHETIC": "synthetic", "my.mod:Loader": "my.mod:Loader"},
        ["", "prompt", "my.mod"],
    ),
    AllFields.core_type.from_string: (
        {
            "torch": "torch",
            "DUMMY": "dummy",
            "triton_grpc": "triton_grpc",
            "my.module:Class": "my.module:Class",
        },
        ["", "dumy", "torch,dummy", "torch "],
    ),
    AllFields.batch_scheduler_policy.from_string: (
        {
            "max_util": "max_util",
            "No_Evict": "no_evict",
            "MAX_UTILIZATION": "max_util",
            "STATIC_BATCH": "static",
        },
        ["", "max", "evict", "max_util,no_evict"],
    ),
    AllFields.gpu_batch_size.from_string: (
        {"2048": 2048, "llama2-70b:8,moe:16": {"llama2-70b": 8, "mixtral-8x7b": 16}},
        ["0", "", "a", "a:1", "moe:1,mixtral:2", "moe:0", "moe:b", ":4", "moe:1,4"],
    ),
    urls: (
        {"a:1,b:65535": ("a:1", "b:65535"), "[::1]:80": ("[::1]:80",)},
        ["", "a", "a:", ":1", "a:0", "a:65536", "a:1,b", "a:1,", "a:1,a:1", "http://a:1", "a b:1"],
    ),
    http_urls: (
        {
            "a:1,https://b:65535": ("a:1", "https://b:65535"),
            "http://a:1/v1": ("http://a:1",),
            "https://a/models/b/v1/,https://a": ("https://a/models/b", "https://a"),
        },
        ["", "a", "ftp://a:1", "https://:1", "https://a:1/v1/completions", "a:1,a:1", "http://a,http://a/v1"],
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
        quoted_text = (text if len(text) <= 1000 else text[:1000] + "...") if text.strip() else repr(text)
        assert str(error.value).startswith(f"--{field.name} {quoted_text}: expected ")
        assert "``" not in str(error.value), "a docstring is no message"


@pytest.mark.parametrize("option", ["--min_duration=", "--core_type=", "--mode= ", "--min_query_count="])
def test_an_empty_value_is_quoted_in_the_error(option: str) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(ConfigError, match=f"^{name} '{value}': "):
        parse_run([option])


def test_every_option_has_a_default_of_its_own_kind() -> None:
    config = parse_run(DUMMY)
    for field in FIELDS:
        assert (
            field.name in ("core_type", "trtllm_runtime_flags") or config.values[field.name] == field.default
        )
        assert config.where(field.name) == ("command line" if field.name == "core_type" else "default")
        assert field.choices == () or field.default in (None, *field.choices)
        assert not field.default_text or field.parse(field.default_text, "--x") == field.default
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
    assert config.is_user_set("max_output_len")
    assert not config.is_user_set("seed")


def test_of_an_option_that_is_given_twice_the_last_counts() -> None:
    assert parse_run([*DUMMY, "--seed", "1", "--seed=2"]).seed == 2
    assert parse_run([*DUMMY, "--models=llama2", "--benchmarks", "moe"]).benchmarks == ("mixtral-8x7b",), (
        "by whichever of its names"
    )


def test_values_keep_their_hyphens() -> None:
    config = parse_run([*DUMMY, "--log-dir=my-runs/a--b", "--model_path", "smol-lm"])
    assert (config.log_dir, config.model_path) == ("my-runs/a--b", "smol-lm")


def test_a_value_may_be_options_of_another_command() -> None:
    parser = Parser(prog="mpillm")
    parser.add_argument("--run_options")
    value = "--max_batch_size 4 --model-path smol-lm"
    assert parser.parse_args(["--run-options", value]).run_options == value


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field.name))
def test_every_misspelt_option_names_the_nearest(field: Any) -> None:
    wrong = f"--{field.name[:-2]}{field.name[-1]}{field.name[-2]}x"
    with pytest.raises(ConfigError) as error:
        parse_run([*DUMMY, wrong, "1"])
    assert f"unknown option {wrong}" in str(error.value)
    assert "did you mean '--" in str(error.value)


@pytest.mark.parametrize(
    "before",
    [["--shuffle"], ["--goodput", "ttft:500"], ["--seed", "1"], ["--seed=1"], ["--harness_args", "x"]],
)
def test_an_unknown_option_with_blanks_is_no_value_of_the_option_before_it(before: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run([*DUMMY, *before, '--extra-bdy={"priority": 1}'])
    hint = " (did you mean '--extra_body'?)"
    assert str(error.value) == f'mpillm run: unknown option --extra_bdy={{"priority": 1}}{hint}'


def test_a_value_with_blanks_that_looks_like_an_option_stays_one() -> None:
    parser = Parser(prog="mpillm")
    parser.add_argument("--run_options")
    value = "--max_batch_size=4 --model-path smol-lm"
    assert parser.parse_args(["--run_options", value]).run_options == value
    _, unknown = Parser(prog="mpillm").parse_known(["--run_options", value])
    assert unknown == ["--run_options", value]


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


def test_json_has_the_source_of_each_value() -> None:
    json = parse_run([*DUMMY, "--seed", "3"]).to_json()
    assert json["seed"] == {"value": 3, "source": "command line"}
    assert json["top_k"] == {"value": 0, "source": "default"}


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError):
        _ = parse_run(DUMMY).no_such_option  # type: ignore[attr-defined]


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
    assert config.where("models") == config.where("benchmarks") == "command line"
    assert config.is_user_set("trtllm_disagg_config_path")


def test_serve_computes_a_prompt_longer_than_a_step_in_several() -> None:
    """It advertises the model's whole context, so it may not refuse what a step can't hold."""
    config = parse_serve([])
    assert config.enable_chunked_context
    assert config.trtllm_runtime_flags["enable_chunked_context"] is True
    assert not parse_serve(["--enable_chunked_context", "false"]).enable_chunked_context
    assert not parse_run([]).enable_chunked_context


def test_an_api_key_is_printed_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is not in config.json, not in the difference of two ranks, and not in a repr."""
    monkeypatch.setenv("MPILLM_API_KEY", "sesame")
    config = parse_serve(DUMMY)
    assert config.api_key == Secret("sesame")
    assert "sesame" not in json.dumps(config.to_json()) + repr(config.values) + config.named("api_key")
    other = parse_serve([*DUMMY, "--api_key", "open"])
    assert other.api_key == Secret("open") and not {"open", "sesame"} & {
        *re.findall(r"\w+", other.difference(config.values))
    }
