"""Limits in vLLM's and AIPerf's words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.experiments.goodput_limits import user_conf
from mpillm.report.goodput import good_per_second, late, parse_goodput
from mpillm.report.request_log import RECORD


@pytest.mark.parametrize(
    "words",
    [
        ["ttft:500", "tpot:50", "e2el:9000"],
        ["time_to_first_token:500 inter_token_latency:50 request_latency:9000"],
        ["ttft:500,tpot:50.0,e2el:9000"],
    ],
)
def test_both_tools_words(words: list[str]) -> None:
    assert parse_goodput(words) == {"ttft": 500, "tpot": 50, "e2el": 9000}


def test_only_loadgen_wants_whole_milliseconds() -> None:
    assert parse_goodput(["tpot:12.5"], whole=False) == {"tpot": 12.5}
    for text in ("tpot:0", "tpot:nan", "tpot:inf", "tpot:-1", "tpot:"):
        with pytest.raises(ConfigError, match=f"--goodput {text}: expected tpot:MILLISECONDS"):
            parse_goodput([text], whole=False)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ttf:500", r"no latency 'ttf' \(did you mean 'ttft'\?\)"),
        ("ttft", "expected ttft:MILLISECONDS"),
        ("ttft:0.5", "a whole number of at least 1"),
        ("ttft:fast", "a whole number of at least 1"),
        ("ttft:5 time_to_first_token:6", "ttft has two limits"),
    ],
)
def test_wrong_limits_are_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_goodput([word])


def test_a_users_conf_stays_in_force(tmp_path: Path) -> None:
    (tmp_path / "user.conf").write_text("*.Server.max_duration = 9000")
    text = user_conf({"ttft": 500}, "llama2-70b", str(tmp_path / "user.conf"))
    assert "*.Server.max_duration = 9000\nllama2-70b.Server.ttft_latency = 500\n" in text
    assert "llama2-70b.Server.tpot_latency = 1000000000" in text


def test_good_requests_meet_all_limits(tmp_path: Path) -> None:
    rows = np.array(
        [
            (0.0, 0.1, 0.5, 0, 5, 0),  # 100 ms per token
            (0.1, 0.3, 0.4, 0, 5, 0),  # late first token
            (0.2, 0.1, 0.1, 0, 1, 0),  # one token: no time per token
            (0.3, 0.1, 0.2, 0, 5, 1),  # an error
        ],
        RECORD,
    )
    rows.tofile(tmp_path / "requests.bin")
    limits = {"ttft": 200, "tpot": 90, "e2el": 450}
    assert late(rows, limits) == {"ttft": 1, "tpot": 1, "e2el": 1}
    assert good_per_second(tmp_path, limits, 2.0) == 0.5
