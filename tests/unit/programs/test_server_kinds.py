"""Kinds of servers: their command lines, what they refuse, and what they make of a log."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpillm.programs.servers.kind import ServerNode, ServerSpec
from mpillm.programs.servers.kinds import kind_of

VALUES = {
    "tensor_parallelism": 4,
    "max_batch_size": 8,
    "kv_cache_dtype": "fp8",
    "enable_chunked_context": True,
}


def words(kind: str, values: dict[str, Any], **more: Any) -> list[str]:
    spec = ServerSpec(kind_of(kind), "/models/it", values, port=8123, folder=Path("run"))
    return list(replace(spec, **more).command().argv)


def test_vllm() -> None:
    made = words("vllm", VALUES, args=("--enforce-eager",))
    assert made[:3] == ["vllm", "serve", "/models/it"] and made[-1] == "--enforce-eager"
    line = " ".join(made)
    for part in (
        *("--served-model-name it", "--port 8123", "--tensor-parallel-size 4", "--max-num-seqs 8"),
        *("--kv-cache-dtype fp8", "--enable-chunked-prefill", "--no-enable-prefix-caching"),
    ):
        assert part in line
    assert "--enable-prefix-caching" in words("vllm", {"enable_kv_cache_reuse": True})


def test_sglang() -> None:
    line = " ".join(words("sglang", VALUES))
    for part in ("--tp-size 4", "--kv-cache-dtype fp8_e4m3", "--disable-radix-cache", "--enable-metrics"):
        assert part in line
    assert "--disable-radix-cache" not in words("sglang", {"enable_kv_cache_reuse": True})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ValueError: Not enough memory. Please try to increase --mem-fraction-static.", "gets no memory"),
        ("Exception: Capture cuda graph failed: CUDA error: out of memory", "could not be captured"),
        ("ImportError: Please install mooncake by following the instructions at", "has no Mooncake"),
        ("ImportError: Please install NIXL by following the instructions at", "has no NIXL"),
        ("AssertionError: Torch not compiled with CUDA enabled", "built without CUDA"),
        ("max_total_num_tokens=20000, chunked_prefill_size=4096", ""),
    ],
)
def test_sglang_s_log_is_explained(line: str, expected: str) -> None:
    found = kind_of("sglang").explain(line)
    assert expected in found and bool(expected) == bool(found)


def test_sglang_computes_whole_prompts_of_a_step_s_tokens() -> None:
    """Of two sizes of chunks its parser takes the last: none, whatever a step may hold."""
    made = words("sglang", {"enable_chunked_context": False, "max_num_tokens": 4096})
    assert made[made.index("--max-prefill-tokens") + 1] == "4096"
    sizes = [after for word, after in pairwise(made) if word == "--chunked-prefill-size"]
    assert sizes[-1] == "-1"


def test_trtllm_serve_has_a_file() -> None:
    line = " ".join(words("trtllm-serve", VALUES))  # of an unknown release: the name that all of them have
    assert "--tp_size 4" in line and "--extra_llm_api_options run/server_0.yaml" in line
    text = (kind := kind_of("trtllm-serve")).file_text(ServerSpec(kind, "m", VALUES))
    assert yaml.safe_load(text)["kv_cache_config"] == {"enable_block_reuse": False, "dtype": "fp8"}


def test_own_serve_has_as_many_ranks_as_its_layout() -> None:
    line = " ".join(words("mpillm", {"tensor_parallelism": 2, "pipeline_parallelism": 2}))
    assert "mpirun -n 5 serve" in line and "--tensor_parallelism 2" in line


def test_context_and_generation_servers_of_own_serve_have_no_control_rank() -> None:
    line = " ".join(words("mpillm", {"tensor_parallelism": 2}, role="context"))
    assert "mpirun -n 2 serve" in line and line.endswith("--server_role context")


def test_parts_of_servers_over_several_nodes() -> None:
    first, second = (ServerNode(number, 2, "h1", 4711) for number in (0, 1))
    line = " ".join(words("vllm", VALUES, node=first, address="10.0.0.1"))
    assert line.endswith("--nnodes 2 --node-rank 0 --master-addr h1 --master-port 4711")
    line = " ".join(words("vllm", VALUES, node=second, address="10.0.0.2"))
    assert line.endswith("--nnodes 2 --node-rank 1 --master-addr h1 --master-port 4711 --headless")
    spec = ServerSpec(kind_of("vllm"), "m", VALUES, node=second, address="10.0.0.2")
    assert spec.command().env["VLLM_HOST_IP"] == "10.0.0.2"
    line = " ".join(words("sglang", VALUES, node=second))
    assert line.endswith("--nnodes 2 --node-rank 1 --dist-init-addr h1:4711")
    kind = "command:srv {port} --of {node}/{nodes}@{first_host}:{first_port}"
    assert words(kind, {}, node=second)[-1] == "1/2@h1:4711"
    for other in ("mpillm", "command:srv {port}"):
        with pytest.raises(ValueError, match=r"server_nodes 2: a .* server is started on one node"):
            words(other, {}, node=first)


def test_any_command() -> None:
    kind = "command:srv --listen {host}:{port} '{model} {name}' --tp={tp} --gpus {devices}"
    made = words(kind, {"tensor_parallelism": 2}, devices=(3, 5))
    assert made == ["srv", "--listen", "127.0.0.1:8123", "/models/it it", "--tp=2", "--gpus", "3,5"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("vlm", "did you mean 'vllm'"),
        ("command:srv", "with {port} in them"),
        ("command:srv {port} {gpu}", "{gpu} is none of {model}"),
        ("command:srv 'x {port}", "No closing quotation"),
    ],
)
def test_what_is_no_kind(kind: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kind_of(kind)


def test_values_that_a_kind_can_not_take_are_named() -> None:
    with pytest.raises(ValueError, match="quantization int8: a vllm server has only fp8"):
        words("vllm", {"quantization": "int8"})
    with pytest.raises(ValueError, match="tensor_parallelism: a command: server has nothing like it"):
        words("command:srv {port}", {"tensor_parallelism": 2})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "too little memory"),
        (
            "Free memory on device cuda:0 (1/80 GiB) is less than desired GPU memory utilization",
            "hold memory",
        ),
        ("vllm: error: unrecognized arguments: --nonsense", "does not know --nonsense"),
        ("vllm: error: argument --dtype: invalid choice: 'x'", "does not accept the value"),
        ("OSError: [Errno 98] Address already in use", "has taken its port"),
        ("ModuleNotFoundError: No module named 'torchvision'", "lacks this package"),
        ("all is well", ""),
    ],
)
def test_vllm_s_log_is_explained(line: str, expected: str) -> None:
    found = kind_of("vllm").explain(f"before\n{line}\nafter")
    assert expected in found and bool(found) == bool(expected)


# --- --acceptance_length ---

NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
SET = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}


@pytest.mark.parametrize(
    "args",
    [
        ("--speculative-config", NGRAM, "--enforce-eager"),
        ("--speculative_config", NGRAM, "--enforce-eager"),
        (f"--speculative-config={NGRAM}", "--enforce-eager"),
        ("-sc", NGRAM, "--enforce-eager"),
    ],
    ids=" ".join,
)
def test_acceptance_length_of_vllm(args: tuple[str, ...]) -> None:
    """Two keys of its JSON: any rejection sampling but the synthetic one ignores the length."""
    made = words("vllm", {"acceptance_length": 2.5}, args=args)
    n = len(args)
    assert made[-1] == "--enforce-eager" and len(made) == len(words("vllm", {}, args=args))
    flag, _, text = made[-n].partition("=")
    assert flag == args[0].partition("=")[0]
    assert json.loads(text or made[1 - n]) == json.loads(NGRAM) | SET


def test_acceptance_length_of_vllm_with_keys_as_flags() -> None:
    args = ("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=4")
    assert words("vllm", {"acceptance_length": 2.5}, args=args)[-4:] == [
        *("--speculative-config.rejection_sample_method", "synthetic"),
        *("--speculative-config.synthetic_acceptance_length", "2.5"),
    ]
    with pytest.raises(ValueError, match="at most 5 tokens"):
        words("vllm", {"acceptance_length": 5.5}, args=args)


def environment(kind: str, length: float, args: str = "", **more: Any) -> dict[str, str]:
    values = {"acceptance_length": length} | more.pop("values", {})
    spec = ServerSpec(kind_of(kind), "/models/it", values, args=tuple(args.split()), **more)
    return dict(spec.command().env)


def test_acceptance_length_of_sglang() -> None:
    args = "--speculative-algorithm EAGLE --speculative-num-steps 3"
    assert environment("sglang", 2.5, args).items() >= {
        ("SGLANG_SIMULATE_ACC_LEN", "2.5"),
        ("SGLANG_SIMULATE_ACC_METHOD", "match-expected"),
        ("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token"),
    }
    assert "SGLANG_SIMULATE_ACC_LEN" in environment("sglang", 4, args)


def test_acceptance_length_of_trtllm_serve() -> None:
    """Its variable does not count the model's own token."""
    values = {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3}}
    name = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
    assert environment("trtllm-serve", 2.6, values=values)[name] == "1.6"
    assert environment("trtllm-serve", 4, llm_args=values, role="generation")[name] == "3"
    assert name not in environment("trtllm-serve", 4, role="context")
    text = (kind := kind_of("trtllm-serve")).file_text(ServerSpec(kind, "m", values))
    assert yaml.safe_load(text)["speculative_config"] == values["speculative_config"]


def test_acceptance_length_of_own_serve() -> None:
    args = ("--speculative_config", "decoding_type:NGram,max_draft_len:4")
    made = words("mpillm", {"acceptance_length": 2.5}, args=args)
    assert made[-4:] == [*args, "--acceptance_length", "2.5"]


@pytest.mark.parametrize(
    ("kind", "length", "more", "message"),
    [
        (
            "vllm",
            2.5,
            {},
            "acceptance_length 2.5: a vllm server has no draft tokens; add --spec",
        ),
        ("vllm", 5.5, {"args": f"--speculative-config {NGRAM.replace(' ', '')}"}, "at most 5 tokens"),
        ("vllm", 2, {"args": "--speculative-config ngram"}, "has no JSON object"),
        ("vllm", 2, {"args": "-sc"}, "has no draft tokens"),
        ("sglang", 2.5, {}, "add --speculative-algorithm to --server_args"),
        ("sglang", 4.1, {"args": "--speculative-algorithm X --speculative-num-steps 3"}, "at most 4"),
        ("sglang", 4.1, {"args": "--speculative-algorithm X --speculative-num-draft-tokens 4"}, "at most 4"),
        ("trtllm-serve", 2.5, {}, "set --speculative_config"),
        ("trtllm-serve", 1, {"values": {"speculative_config": {"max_draft_len": 3}}}, "above 1"),
        ("trtllm-serve", 5, {"values": {"speculative_config": {"max_draft_len": 3}}}, "at most 4"),
        ("mpillm", 2.5, {}, "add --speculative_config to --server_args"),
        ("command:x {port}", 2.5, {}, "acceptance_length: a command: server has nothing like it"),
    ],
)
def test_acceptance_lengths_that_a_server_cannot_have(
    kind: str, length: float, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        environment(kind, length, **more)


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("vllm", ("--speculative-config", json.dumps(SET))),
        ("vllm", ("--speculative-config.synthetic_acceptance_rates", "[1]")),
        ("mpillm", ("--acceptance_length", "2")),
    ],
)
def test_a_server_s_own_setting_is_refused(kind: str, args: tuple[str, ...]) -> None:
    """Nothing in the result would show that the acceptance is not measured."""
    with pytest.raises(ValueError, match="use --acceptance_length instead, so that the result contains it"):
        words(kind, {}, args=args)


def test_a_server_s_own_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(ValueError, match="use --acceptance_length instead"):
        words("sglang", {})
    words("vllm", {})


# --- --reset_prefix_cache ---


def test_servers_get_a_route_that_empties_the_prefix_cache() -> None:
    name = "VLLM_SERVER_DEV_MODE"
    for resets in (True, False):
        spec = ServerSpec(kind_of("vllm"), "m", {}, resets_prefix_cache=resets)
        assert (spec.command().env.get(name) == "1") is resets
        assert ("--reset_prefix_cache" in words("mpillm", {}, resets_prefix_cache=resets)) is resets
    assert words("sglang", {}, resets_prefix_cache=True) == words("sglang", {}), "it always has one"


# --- --profile ---


def test_profilers_write_to_the_run_directory() -> None:
    folder = str(Path("run/server_0_profile").absolute())
    made = words("vllm", {}, profiles=True)
    config = json.loads(made[made.index("--profiler-config") + 1])
    assert config == {"profiler": "torch", "torch_profiler_dir": folder}
    args = ("--profiler-config.profiler", "cuda")
    assert "--profiler-config" not in words("vllm", {}, profiles=True, args=args), "the user's"
    assert "--profiler-config" not in words("vllm", {})
    spec = ServerSpec(kind_of("sglang"), "m", {}, folder=Path("run"), profiles=True)
    assert spec.command().env["SGLANG_TORCH_PROFILER_DIR"] == folder
