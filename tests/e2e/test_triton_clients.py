"""triton-client, e2e-test and bench core-model, typed by a user, over real tritonservers.

Only with `make test-triton`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import tokenizers

from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.ports import free_ports
from tests.helpers.real_triton import MARKS, generate, serving
from tests.helpers.support import DONE, NOT_READY, TEST_FAILED, USAGE, Starter

pytestmark = MARKS

PROMPTS = ["Name a fruit.", "The cat is", "1 2 3"]


def test_clients_and_benchmarks(one: Starter) -> None:
    """They work with a server with decoupled models, and with one whose models are not."""
    generate(one, "--triton_text_models", scenario="Offline")
    (one.folder / "repo_0").rename(one.folder / "whole")
    generate(one, "--triton_text_models")
    (one.folder / "whole").rename(one.folder / "repo_1")
    make_tokenizer(one.folder / "tokenizer")
    data = [{"input": text, "instruction": "now", "output": "one two three"} for text in PROMPTS]
    (one.folder / "prompts.json").write_text(json.dumps(data))
    with serving(one, 2) as (ports, http):
        for port in ports:
            tokens(one, port)
            text(one, port)
            end_to_end(one, "grpc", port)
        end_to_end(one, "http", http[1])
        streams(one, ports[0])
        core_model(one, ports, http)
        failures(one, ports[0], http[0])


def tokens(one: Starter, port: int) -> None:
    """Check both kinds of model, with and without the prompt in front."""
    address = ("tokens", "-u", f"localhost:{port}", "--tokenizer-dir", "tokenizer")
    words = (*address, "--text", "Name a fruit.", "--request-output-len", 6)
    lines = one.mpillm("triton-client", *words).must(DONE).out.splitlines()
    tokenizer = tokenizers.Tokenizer.from_file(str(one.folder / "tokenizer/tokenizer.json"))
    prompt = tokenizer.encode("Name a fruit.").ids
    assert lines[:2] == ["Using pad_id:  50256", "Using end_id:  -1"]
    assert lines[2:5] == [f"Input sequence:  {prompt}", "Got completed request", "Input: Name a fruit."]
    assert lines[5].startswith("Output beam 0: ")
    whole = json.loads(lines[-1].removeprefix("Output sequence:  "))
    assert whole[: len(prompt)] == prompt and len(whole) == len(prompt) + 6
    (one.folder / "expected.csv").write_text(",".join(map(str, whole[len(prompt) :])))
    check = ("--exclude-input-in-output", "--check-output", "--output-tokens-csv")
    assert "PASS!" in one.mpillm("triton-client", *words, *check, "expected.csv").must(DONE).out
    (one.folder / "other.csv").write_text("1,2,3")
    assert "FAIL!" in one.mpillm("triton-client", *words, *check, "other.csv").must(TEST_FAILED).out


def streams(one: Starter, port: int) -> None:
    """Check a line for each step, and early stopping by a request and by gRPC's cancellation."""
    words = ("tokens", "-u", f"localhost:{port}", "--tokenizer-dir", "tokenizer")
    expected = json.loads("[" + (one.folder / "expected.csv").read_text() + "]")
    out = one.mpillm(
        "triton-client", *words, "--text", "Name a fruit.", "--streaming", "--request-output-len", 6
    ).must(DONE)
    assert re.findall(r"^\[(\d+)\]$", out.out, re.MULTILINE) == [str(token) for token in expected], out
    for how, message in (
        ((), "Got cancellation response from server"),
        (("--stop-via-request-cancel", "--streaming"), "Request is cancelled"),
    ):
        long = ("--stop-after-ms", 1, "--request-output-len", 1500, "--end-id", -1)
        ended = one.mpillm("triton-client", *words, *long, *how).must(DONE)
        assert message in ended.out and "had ended before" not in ended.err, ended


def text(one: Starter, port: int) -> None:
    """Check that a batch has the answers of single requests, one for each prompt, and needs a decoupled
    model."""
    address = ("-u", f"localhost:{port}", "-o", 5, "-p", json.dumps(PROMPTS))
    single = one.mpillm("triton-client", "text", *address, "--exclude-input-in-output").must(DONE).out
    is_decoupled = not (one.folder / "batch.txt").exists()
    (one.folder / "batch.txt").write_text(single)
    assert re.findall(r"^0: ", single, re.MULTILINE) == ["0: "] * 3
    if is_decoupled:
        batch = one.mpillm(
            "triton-client", "text", *address, "--exclude-input-in-output", "--batch-inputs"
        ).must(DONE)
        assert sorted(re.sub(r"^\d: ", "", batch.out, flags=re.MULTILINE)) == sorted(
            re.sub(r"^\d: ", "", single, flags=re.MULTILINE)
        )
    wrong = ("--check-outputs", "--expected-outputs", json.dumps(["a", "b", "c"]))
    ended = one.mpillm("triton-client", "text", *address, *wrong).must(TEST_FAILED)
    assert "expected 'Name a fruit.a', not 'Name a fruit." in ended.err


def end_to_end(one: Starter, protocol: str, port: int) -> None:
    words = ("--dataset", "prompts.json", "-i", protocol, "-u", f"localhost:{port}", "--max-input-len", 500)
    lines = one.mpillm("e2e-test", *words, "--test-bls").must(DONE).out.splitlines()
    assert lines[:4] == [
        "[INFO] Start testing on 3 prompts.",
        "[INFO] Functionality test succeed.",
        "[INFO] Warm up for benchmarking.",
        "[INFO] Start benchmarking on 3 prompts.",
    ]
    assert re.fullmatch(r"\[INFO\] Total Latency: [\d.]+ ms", lines[4])


def core_model(one: Starter, ports: list[int], http: list[int]) -> None:
    lengths = ("--input-mean", 16, "--input-stdev", 3, "--output-mean", 5, "--num-requests", 12)
    runs = [
        *(("grpc", port, ("token_norm_dist", *lengths, "--request_rate", 100)) for port in ports),
        *(("http", port, ("token-norm-dist", *lengths, "--concurrency", 4)) for port in http),
        ("http", http[0], ("--streaming", "token_norm_dist", *lengths)),
        ("grpc", ports[0], ("dataset", "--dataset", "prompts.json", "--tokenizer_dir", "tokenizer")),
    ]
    for protocol, port, words in runs:
        ended = one.mpillm(
            "bench", "core-model", "-i", protocol, "-u", f"localhost:{port}", *words,
            "--result_filename", "result.json",
        ).must(DONE)  # fmt: skip
        result = json.loads((one.folder / "result.json").read_text())
        n = 12 if "dataset" not in words else 3
        assert (result["requests"], result["errors"]) == (n, 0)
        assert result["output_tokens"] == (5 if n == 12 else 3)
        rows = re.findall(r"^\| +(.+?) +\| +([\d.]+) +\|$", ended.out, re.MULTILINE)
        assert [name for name, _ in rows] == [
            "Requests/Sec",
            "OP tokens/sec",
            "Avg. latency (ms)",
            "P99 latency (ms)",
            "P90 latency (ms)",
            "Avg. IP tokens per request",
            "Avg. OP tokens per request",
            "Total latency (ms)",
            "Total requests",
        ]
        streamed = port == ports[0] or "--streaming" in words
        assert ("inter-token latency" in ended.out) is streamed, ended


def failures(one: Starter, port: int, http: int) -> None:
    """Check the one message for each: nobody there, no such model, a decoupled model over HTTP, tokens that
    are none."""
    (nobody,) = free_ports(1)
    client = ("triton-client", "tokens", "--tokenizer-dir", "tokenizer")
    ended = one.mpillm(*client, "-u", f"localhost:{nobody}").must(TEST_FAILED)
    assert "UNAVAILABLE" in ended.message
    ended = one.mpillm(*client, "-u", f"localhost:{port}", "--model-name", "tensorrt_lm").must(TEST_FAILED)
    assert "tensorrt_lm" in ended.message
    ended = one.mpillm("e2e-test", "--dataset", "prompts.json", "-i", "http", "-u", f"localhost:{http}")
    assert "decoupled" in ended.must(TEST_FAILED).message
    bench = ("bench", "core-model", "-t", 10, "token_norm_dist", "--num_requests", 4)
    ended = one.mpillm(*bench, "-u", f"localhost:{nobody}").must(NOT_READY)
    assert f"tritonserver localhost:{nobody} was not ready within 10 s" in ended.message
    ended = one.mpillm(*bench, "-u", f"localhost:{port}", "--vocab_size", 10**9).must(TEST_FAILED)
    assert "a token is not in its vocabulary" in ended.message


def test_what_is_refused_before_a_request(one: Starter, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    for words, message in (
        (("triton-client", "token"), "no client 'token' (did you mean 'tokens'?)"),
        (("triton-client", "tokens"), "needs --tokenizer_dir or --input_tokens_csv"),
        (("triton-client", "tokens", "--check-output", "--tokenizer_dir", tmp_path), "--output_tokens_csv"),
        (
            ("triton-client", "text", "-p", "a", "-n", 2, "-b", 2),
            "--num_return_sequences: cannot be combined with --beam_width",
        ),
        (("triton-client", "text", "-p", "a", "--lora-path", "x"), "x/model.lora_weights.npy: "),
        (("e2e-test",), "e2e-test needs --dataset"),
        (("bench", "core-model"), "needs one of dataset, token_norm_dist"),
        (("bench", "core-model", "-i", "mpi", "token_norm_dist"), "-i mpi needs --model_path"),
    ):
        assert message in one.mpillm(*words).must(USAGE).message, words
