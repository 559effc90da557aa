"""Warnings about prompts that a server knows from an earlier test."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mpillm.experiments import run_pairs
from mpillm.experiments.commands import ab
from mpillm.experiments.warm_cache import RepeatedPrompts, cached_share, warning
from mpillm.options.options import parse_run
from mpillm.options.run_config import RunConfig
from mpillm.runtime.whole_runs import EndedRun

MAY = "the server may have prompts of earlier requests in its prefix cache, and does not report this"


def config(*words: str) -> RunConfig:
    return parse_run(["--core_type=trtllm_endpoint", *words])


def counted(cached: float | None, prompts: float = 200.0) -> dict[str, Any]:
    of_server = {} if cached is None else {"server_cached_tokens": cached}
    return {"per_instance": [{"server_prompt_tokens": prompts, **of_server}]}


def test_the_text_has_the_share_and_the_remedies() -> None:
    text = warning(0.97, random_prompts=True)
    assert text.startswith("the server had 97 % of the prompt tokens in its prefix cache; ")
    assert "--cache_salt test" in text and "another --seed" in text
    assert warning(None, random_prompts=False).startswith(MAY)
    assert "--seed" not in warning(None, random_prompts=False)
    assert warning(0.5, random_prompts=False, of_run=False).endswith("use --cache_salt test")
    assert warning(0.009, random_prompts=True) == "" == warning(0.0, random_prompts=True)


@pytest.mark.parametrize(
    ("result", "share"),
    [
        (counted(50.0), 0.25),
        (counted(None), None),
        (counted(0.0, 0.0), None),
        ({}, None),
        (
            {"conversations": {"first_turns": {"cached_share": 0.5}, "later_turns": {"cached_share": 0.9}}},
            0.5,
        ),
        ({"conversations": {"first_turns": {"cached_share": None}}} | counted(20.0), 0.1),
    ],
)
def test_the_share_is_that_of_the_servers(result: dict[str, Any], share: float | None) -> None:
    assert cached_share(result) == share


def warned(configs: list[RunConfig], results: list[dict[str, Any] | None]) -> list[bool]:
    repeated = RepeatedPrompts()
    return [bool(repeated.warning(*one)) for one in zip(configs, results, strict=True)]


def test_one_warning_when_the_same_prompts_come_again() -> None:
    url = config("--url=h:1")
    assert warned([url] * 3, [counted(100.0)] * 3) == [False, True, False]
    assert warned([url] * 3, [counted(0.0), counted(0.0), counted(9.0)]) == [False, False, True]
    assert warned([url] * 3, [None, None, counted(None)]) == [False, False, True]


@pytest.mark.parametrize(
    ("first", "second", "is_warned"),
    [
        (["--url=h:1"], ["--url=h:2"], False),
        (["--url=h:1", "--seed=1"], ["--url=h:1", "--seed=2"], False),
        (
            ["--url=h:1", "--concurrency=1", "--harness=conversations", "--dataset_path=a.jsonl"],
            ["--url=h:1", "--dataset_path=a.jsonl"],
            True,
        ),
        (
            ["--url=h:1", "--seed=1", "--dataset_path=a.jsonl"],
            ["--url=h:1", "--seed=2", "--dataset_path=a.jsonl"],
            True,
        ),
        (["--url=h:1", "--dataset_path=a.jsonl"], ["--url=h:1", "--dataset_path=b.jsonl"], False),
        (["--url=h:1", "--cache_salt=test"], ["--url=h:1", "--cache_salt=test"], False),
    ],
)
def test_which_prompts_are_the_same(first: list[str], second: list[str], is_warned: bool) -> None:
    assert warned([config(*first), config(*second)], [counted(9.0)] * 2) == [False, is_warned]


@pytest.mark.parametrize(
    ("options", "n_warnings"), [(["--url=h:1"], 1), (["--url=h:1", "--cache_salt=test"], 0)]
)
def test_a_comparison_warns_once_that_its_second_run_finds_the_prompts(
    options: list[str],
    n_warnings: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = itertools.count(1)

    def run_in(folder: Path, *_: object) -> EndedRun:
        folder.mkdir(parents=True)
        figures = {"samples_per_second": 1.0, "tokens_per_second": 20.0 + next(number) % 3, "doubts": []}
        latencies = {"ttft_ms": None, "tpot_ms": None}
        return EndedRun(folder, 0, {"status": "VALID", **figures, **latencies, **counted(150.0)})

    monkeypatch.setattr(run_pairs, "run_in", run_in)
    sides = ["--max_batch_size 4", "--max_batch_size 8"]
    words = ["-n=2", "--core_type=trtllm_endpoint", "--pairs=3", f"--log_dir={tmp_path / 'ab'}"]
    assert ab.main([*sides, *words, *options]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "ab" / "ab.html").read_text()
    assert out.count("warning: the server had 75 %") == page.count("the server had 75 %") == n_warnings


def test_servers_that_each_run_starts_know_nothing() -> None:
    own = parse_run(["--server=vllm", "--model_path=tiny-llama"])
    dummy = parse_run(["--core_type=dummy"])
    for one in (own, dummy):
        assert warned([one] * 2, [counted(9.0)] * 2) == [False, False]
