"""Where other people's programs are, if `tools.install_peers` has installed them, and a model for them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.environment import clean_environment
from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.owned import guards, words_of
from tests.helpers.support import (
    DONE,
    ROOT,
    Command,
    Ended,
    Starter,
    descendants,
    wait_until,
)

FOLDER = Path(os.environ.get("MPILLM_PEERS", ROOT / ".venv-peers"))


def on_cpus() -> dict[str, str]:
    """Return what vLLM reads of its environment, and the way to it."""
    return {
        "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # What its compiler makes is kept, not in a test's own TMPDIR: g++ takes a minute.
        "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }


_FORKS = """import multiprocessing

_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: _context("fork" if method == "spawn" else method)
"""


def forking_vllm(folder: Path) -> dict[str, str]:
    """Return an environment, as `on_cpus`, with a vLLM whose processes are forked.

    Its build for CPUs starts each anew, which imports PyTorch and vLLM: most of what a start takes.
    """
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(_FORKS)
    (program := folder / "vllm").write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(folder / "site"))} exec {FOLDER / "bin" / "vllm"} "$@"\n'
    )
    program.chmod(0o755)
    found = {**on_cpus(), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return found | {"PATH": f"{folder}{os.pathsep}{found['PATH']}"}


def tiny_llama(folder: Path) -> Path:
    """Write a model of two layers without weights, for `--load_format dummy`; return its folder."""
    make_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MODEL = "smollm2-135m"
TIMEOUT_S = 1200.0
Program = Callable[[str], Path]
Show = Callable[[str], None]


def peer_environment() -> dict[str, str]:
    """Return an environment for programs that know nothing of this project."""
    return {
        **clean_environment(os.environ),
        "PYTHONPATH": "",
        **on_cpus(),
    }


def typed(starter: Starter, *words: object) -> Ended:
    """Run a program to its end, which must be good."""
    return starter.command(words, env=peer_environment()).end(TIMEOUT_S, tidy=False).must(0)


# A test of few queries, on any machine.
USER_CONF = "".join(
    f"*.Server.{name} = {value}\n"
    for name, value in (
        ("target_latency", 600_000),
        ("ttft_latency", 600_000),
        ("tpot_latency", 600_000),
        ("target_latency_percentile", 90),
    )
)
# Checks of disaggregated serving, for which an aggregated server gives no counts.
TRANSFERS = ["no_failed_transfers", "no_expired_leases", "contexts_arrived"]
Outputs = dict[int, tuple[list[int], str]]  # tokens and text, by index of the prompt


def offline(one: Starter, name: str, core: str, *words: object) -> Outputs:
    """Return the answers of a VALID test."""
    options = ("--min_duration", 0, "--save_outputs", "--log_dir", one.folder / name)
    ended = one.run(2, *words, *options, core=core, log_dir=one.folder / name, timeout=TIMEOUT_S).must(DONE)
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0)
    return {line["index"]: (line["output_tokens"], line["text"]) for line in ended.outputs()}


def server(one: Starter, n: int, *words: object, ranks: int = 2) -> dict[str, Any]:
    """Return the result of a VALID test in scenario Server."""
    conf = one.folder / "user.conf"
    conf.write_text(USER_CONF)
    options = ("--scenarios", "Server", "--server_target_qps", 2, "--min_query_count", n, "--min_duration", 0)
    command = one.start(ranks, *words, *options, "--user_conf", conf, core="trtllm_endpoint")
    result = command.end(TIMEOUT_S).must(DONE).result
    assert (result["status"], result["errors"]) == ("VALID", 0) and result["samples"] >= n
    return result


LENGTH = 32
EAGER: tuple[object, ...] = ("--server", "vllm", "--server_args=--enforce-eager", "--health_deadline", 600)
VLLM: tuple[object, ...] = (*EAGER, "--max_seq_len", 1024)


def options(model: Path, data: Path) -> tuple[object, ...]:
    return ("--dataset_path", data, "--model_path", model, "--max_output_len", LENGTH, "--dtype", "float32")


def processes(command: Command, title: bytes, word: bytes = b"vllm") -> list[int]:
    """Wait for the processes with this title of the server with `word` in its command line, and return them.

    vLLM's titles take the place of our mark; what stands over a server keeps it.
    """

    def find() -> list[int]:
        ids = [pid for pid in guards(command) if word in words_of(pid)]
        return [pid for guard in ids for pid in descendants(guard) if title in words_of(pid)]

    return list(wait_until(find, f"vLLM's {title.decode()}", TIMEOUT_S))


DISAGG = ("--mode", "disaggregated", *VLLM)
