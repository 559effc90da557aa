"""Where other people's programs are, if `tools.install_peers` has installed them, and a model for them."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.support import ROOT

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
