"""Latency limits in vLLM's and AIPerf's words, and which requests met them."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.options.field import Field
from mpillm.options.latency_limits import limits_ms
from mpillm.options.options import parse_run
from mpillm.report.goodput import goodput, late
from mpillm.report.request_log import RECORD
from mpillm.report.validity_checks import late_answers

SERVER = ("--core_type", "dummy", "--scenarios", "Server")
ROWS = np.array(
    [
        (0.0, 0.1, 0.5, 0, 5, 0, -1, -1, 0, 0),  # 100 ms per token
        (0.1, 0.3, 0.4, 0, 5, 0, -1, -1, 0, 0),  # late first token
        (0.2, 0.1, 0.1, 0, 1, 0, -1, -1, 0, 0),  # one token: no time per token
        (0.3, 0.1, 0.2, 0, 5, 1, -1, -1, 0, 0),  # an error
    ],
    RECORD,
)


@pytest.mark.parametrize(
    "words",
    [
        ["ttft:500", "tpot:50", "e2el:9000"],
        ["time_to_first_token:500 inter_token_latency:50 request_latency:9000"],
        ["ttft:500,tpot:50.0,e2el:9000"],
    ],
)
def test_run_takes_both_tools_words(words: list[str]) -> None:
    config = parse_run([*SERVER, "--goodput", *words, "--seed", "3"])
    assert config.goodput == {"ttft": 500, "tpot": 50, "e2el": 9000} and config.seed == 3


def test_only_loadgen_wants_whole_milliseconds() -> None:
    field = Field("goodput", from_string=limits_ms)
    assert field.parse("tpot:12.5", "--goodput") == {"tpot": 12.5}
    for text in ("tpot:0", "tpot:nan", "tpot:inf", "tpot:-1", "tpot:", ""):
        with pytest.raises(
            ConfigError, match=f"--goodput {text or repr(text)}: expected limits in milliseconds"
        ):
            field.parse(text, "--goodput")


def test_a_files_limits_and_those_of_a_command_line_are_the_same() -> None:
    limits = {"ttft": 500.0, "tpot": 12.5}
    field = Field("goodput", from_string=limits_ms)
    assert field.parse(field.text(limits), "--goodput") == limits
    assert field.check(["ttft:500", "tpot:12.5"], "goodput") == limits


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ttf:500", r"no latency 'ttf' \(did you mean 'ttft'\?\)"),
        ("ttft", "expected limits in whole milliseconds, at least 1, such as ttft:500"),
        ("ttft:0.5", "expected limits in whole milliseconds, at least 1, such as ttft:500"),
        ("ttft:fast", "expected limits in whole milliseconds, at least 1, such as ttft:500"),
        ("ttft:5 time_to_first_token:6", "ttft has two limits"),
    ],
)
def test_wrong_limits_are_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run([*SERVER, "--goodput", word])


@pytest.mark.parametrize("scenario", ["Offline", "SingleStream"])
def test_limits_have_no_effect_but_in_server(scenario: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput .* has no effect in scenario {scenario}"):
        parse_run([*SERVER[:2], "--scenarios", scenario, "--goodput", "ttft:500"])


def test_limits_and_the_longest_duration_have_an_effect_on_conversations() -> None:
    words = ["--core_type", "dummy", "--harness", "conversations", "--dataset_path", "x.jsonl"]
    config = parse_run([*words, "--goodput", "ttft:500", "--max_duration", "5"])
    assert config.goodput == {"ttft": 500} and config.scenario == "Offline"


def test_good_requests_meet_all_limits() -> None:
    limits = {"ttft": 200, "tpot": 90, "e2el": 450}
    assert late(ROWS, limits) == {"ttft": 1, "tpot": 1, "e2el": 1}
    found = goodput(ROWS, limits, 2.0)
    assert found["good_requests_per_second"] == 0.5 and found["late"] == {"ttft": 1, "tpot": 1, "e2el": 1}


def test_the_limit_that_loadgen_does_not_know_is_judged_here() -> None:
    """As LoadGen would: among a thousand answers 2 may be late at 99 %."""
    rows = np.zeros(1000, RECORD)
    rows["latency"][:3] = 1.0
    text = late_answers(goodput(rows, {"e2el": 900.0}, 10.0))
    assert text == "3 answers were later than 900 ms, 2 are allowed"
    rows["latency"][:1] = 0.0
    assert not late_answers(goodput(rows, {"e2el": 900.0}, 10.0))
    assert not late_answers(goodput(rows, {"ttft": 900.0}, 10.0))
