"""Tests with LoadGen of servers that others wrote, and their greedy tokens beside those of our engine."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from mpillm.data.tokenizer import load_tokenizer
from tests.helpers.peer_programs import (
    MODEL,
    TIMEOUT_S,
    TRANSFERS,
    USER_CONF,
    Program,
    Show,
    offline,
    peer_environment,
    server,
)
from tests.helpers.ports import free_port
from tests.helpers.support import DONE, Command, Starter, wait_until

pytestmark = pytest.mark.peers


def _start(start: Starter, url: str, *words: object) -> Command:
    """Return a server that answers; its log is what it prints."""
    command = start.command(words, env=peer_environment())

    def answers() -> bool:
        assert command.process.poll() is None, f"{command.end()!r}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    wait_until(answers, f"{words[0]} to answer", TIMEOUT_S)
    return command


def _address() -> tuple[str, int]:
    port = free_port()
    return "127.0.0.1", port


@pytest.fixture(scope="module")
def vllm(start: Starter, model: Path, program: Program) -> str:
    """Return the address of `vllm serve`."""
    host, port = _address()
    words = ("--dtype", "float32", "--max-model-len", 1024, "--served-model-name", MODEL)
    _start(
        start,
        f"http://{host}:{port}",
        program("vllm"),
        "serve",
        model,
        *words,
        "--no-enable-prefix-caching",
        "--host",
        host,
        "--port",
        port,
    )
    return f"{host}:{port}"


@pytest.fixture(scope="module")
def transformers(start: Starter, model: Path, program: Program) -> str:
    """Return the address of `transformers serve`."""
    host, port = _address()
    words = ("--device", "cpu", "--dtype", "float32", "--host", host, "--port", port)
    _start(start, f"http://{host}:{port}", program("transformers"), "serve", model, *words)
    return f"{host}:{port}"


def test_vllm(vllm: str, model: Path, prompts: Callable[[int], Path], one: Starter, show: Show) -> None:
    """Token ids go to and fro: every answer has the tokens of ours."""
    n, length = 160, 32
    data = ("--dataset_path", prompts(n), "--model_path", model, "--max_output_len", length)
    endpoint = ("--trtllm_server_urls", vllm, "--core_options", f"model:{MODEL}")
    ours = offline(one, "ours", "torch", *data, "--dtype", "float32")
    theirs = offline(one, "theirs", "trtllm_endpoint", *data, *endpoint)
    equal = sum(theirs[index][0] == tokens for index, (tokens, _) in ours.items())
    show(f"vLLM: Offline VALID; {equal} of {n} answers have the tokens of the torch core")
    assert len(ours) == len(theirs) == equal == n
    result = server(one, 64, *data, *endpoint)
    (instance,) = result["per_instance"]
    assert instance["retokenized"] == instance["other_answer_length"] == 0
    assert instance["frameworks"] == ["vLLM 0.32.0"]
    show(f"vLLM: Server VALID, first token p50 {result['ttft_ms']['p50']:.0f} ms")


def test_clean_runs_are_not_doubted(
    vllm: str, model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    """Of whatever kind: streamed and whole answers, long and short ones, one client of the server and two."""
    n_clean = 20
    for i in range(n_clean):
        words: list[object] = [
            "--dataset_path",
            prompts(16),
            "--model_path",
            model,
            "--max_output_len",
            2 + 3 * i % 7,
        ]
        words += ["--min_output_len", i % 3, "--trtllm_server_urls", vllm, "--core_options", f"model:{MODEL}"]
        # vLLM 0.32 for CPUs ends if it computes a prompt with a seed in two steps, as in Server.
        words += ["--temperature", 0.5 * (i % 4 == 2), "--min_duration", 0]
        if i % 2:
            (conf := one.folder / "user.conf").write_text(USER_CONF)
            words += ["--scenarios", "Server", "--server_target_qps", 10, "--user_conf", conf]
            words += ["--min_query_count", 64]
        result = one.run(2 + i % 2, *words, core="trtllm_endpoint", timeout=TIMEOUT_S).must(DONE).result
        checks = result["server_checks"]
        doubts = [doubt for doubt in result["doubts"] if not doubt.startswith("disturbed")]
        assert (result["status"], doubts, set(checks.values()) - {None}) == ("VALID", [], {""}), result
        assert [name for name, found in checks.items() if found is None] == TRANSFERS, checks
    show(f"{n_clean} clean runs of vLLM: none is doubted")


def test_two_runs_at_one_server(
    vllm: str, model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    """Each run sees by the server's totals that the other one used it."""
    data = ("--dataset_path", prompts(40), "--model_path", model, "--max_output_len", 32, "--min_duration", 0)
    words = (*data, "--trtllm_server_urls", vllm, "--core_options", f"model:{MODEL}")
    folders = [one.folder / name for name in ("first", "second")]
    runs = [
        one.start(2, *words, "--log_dir", folder, core="trtllm_endpoint", log_dir=folder)
        for folder in folders
    ]
    results = [command.end(TIMEOUT_S).must(DONE).result for command in runs]
    totals = [result["server_checks"]["server_totals"] for result in results]
    show(f"two runs at one vLLM: {totals}")
    assert [result["status"] for result in results] == ["VALID", "VALID"]
    assert all(total.startswith(f"http://{vllm} counts ") for total in totals)
    assert all("tokens more than arrived here: others used it" in total for total in totals)


def test_transformers(
    transformers: str, model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    """Text goes to and fro: every answer has the text of ours; its tokens need not be those generated."""
    n, length = 40, 16
    data = ("--dataset_path", prompts(n), "--model_path", model, "--max_output_len", length)
    endpoint = ("--trtllm_server_urls", transformers, "--core_options", f"model:{model}")
    ours = offline(one, "ours", "torch", *data, "--dtype", "float32")
    theirs = offline(one, "theirs", "trtllm_endpoint", *data, *endpoint)
    equal = sum(theirs[index][0] == tokens for index, (tokens, _) in ours.items())
    end, tokenizer = 2, load_tokenizer(model, apply_chat_template=False)
    texts = sum(
        tokenizer.decode([token for token in tokens if token != end])
        == tokenizer.decode([token for token in theirs[index][0] if token != end])
        for index, (tokens, _) in ours.items()
    )
    show(f"transformers serve: Offline VALID; {equal} of {n} answers have our tokens, {texts} our text")
    assert len(ours) == len(theirs) == texts == n
    result = server(one, 64, *data[:-1], 8, *endpoint)
    assert result["per_instance"][0]["retokenized"] >= 64 and not result["per_instance"][0]["frameworks"]
    show(f"transformers serve: Server VALID, first token p50 {result['ttft_ms']['p50']:.0f} ms")


def test_bench_engine_against_vllm(model: Path, program: Program, one: Starter, show: Show) -> None:
    """The engine and vLLM answer the same prompts in turns, with the same tokens."""
    python = program("vllm").with_name("python")
    words = ("--num_prompts", 4, "--output_len", 4, "--repeats", 1, "--against", "vllm")
    command = one.command(
        (
            one.python,
            "-m",
            "benchmarks",
            "engine",
            "--model_path",
            model,
            "--vllm_python",
            python,
            *words,
        )
    )
    ended = command.end(TIMEOUT_S).must(DONE)
    show(next(line for line in ended.out.splitlines() if line.startswith("  vLLM ")))
    assert re.search(r"answers equal to vLLM [\d.]+.*: 4 of 4", ended.out)
