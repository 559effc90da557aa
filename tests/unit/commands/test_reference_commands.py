"""Every command line of the reference texts: it works, or says in one sentence what is not built and what to
use instead.

The texts are NVIDIA's llmlib and Triton harness READMEs, tensorrtllm_backend's README and that of its
in-flight batching, and a LLaMA workflow of its community. Options and names are theirs, paths are ours. What
they start with docker, git, curl and sbatch is not here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpillm import user_config
from mpillm.cli import main
from mpillm.core_names import BUILT_IN
from mpillm.cores.registry import BackendRegistry
from tests.helpers.skeleton import SKELETON
from tests.helpers.trtllm_stand_in import make_library, make_model

ROOT = Path(__file__).parents[3]
DISAGG = (
    "--benchmarks=llama2-70b --scenarios=offline --core_type=trtllm_disagg"
    " --trtllm_disagg_config_path=disagg.yaml"
)
# What the texts' commands find where they say that it is. The workloads' models are there under their own
# names.
ENGINE = "--engine_dir=engine"
SPREAD = "--model_path=llama --llm_quantizer_outdir=checkpoint --engine_dir=built"

WORKS = {
    # llmlib
    "disaggregation: the file": f"generate_disagg_config {DISAGG}",
    "disaggregation: the servers": f"run_llm_server {DISAGG} --dry_run",
    "disaggregation: the test": f"run_harness {DISAGG} --dry_run",
    "an endpoint": "run_llm_server --core_type=trtllm_endpoint --trtllm_server_urls=localhost:30000"
    " --model_path=llama",
    "the checkpoint": "generate_engines --core_type=trtllm_hlapi --model_path=llama"
    " --llm_quantizer_outdir=checkpoint --quantizer_lib_path_override=build/TRTLLM"
    " --trtllm_checkpoint_flags=qformat:fp8,kv_cache_dtype:fp8",
    "the engine": f"generate_engines --core_type=trtllm_executor {SPREAD} --tensor_parallelism=2"
    " --pipeline_parallelism=2 --moe_expert_parallelism=1 --trtllm_build_flags=max_num_tokens:1024",
    # The Triton harness
    "engines for llama2": "generate_engines --benchmarks=llama2 --scenarios=Offline,Server"
    " --harness_type=triton --accuracy_target=.999",
    "engines for moe": "generate_engines --benchmarks=moe --scenarios=Offline,Server --harness_type=triton",
    "the model repositories": "generate_triton_config --benchmarks=llama3.1-405b --scenarios=offline"
    f" {ENGINE} --harness_type=triton",
    "the model repositories, Server": "generate_triton_config --benchmarks=llama2 --scenarios=server"
    f" {ENGINE} --harness_type=triton",
    "the servers": "run_llm_server --harness_type=triton --benchmarks=llama2"
    " --tritonserver=/opt/tritonserver/bin/tritonserver",
    # The LLaMA workflow, and engines of the other two texts
    "LLaMA 3": f"generate_engines --harness_type=triton {SPREAD}"
    " --trtllm_checkpoint_flags=dtype:float16,tp_size:1"
    " --trtllm_build_flags=gpt_attention_plugin:float16,gemm_plugin:float16,remove_input_padding:enable,"
    "paged_kv_cache:enable,max_batch_size:256,max_input_len:2048,max_num_tokens:1024,opt_num_tokens:1024,"
    "context_fmha:enable,use_paged_context_fmha:enable",
    "GPT": f"generate_engines --harness_type=triton {SPREAD}"
    " --trtllm_checkpoint_flags=dtype:float16,tp_size:4"
    " --trtllm_build_flags=gpt_attention_plugin:float16,remove_input_padding:enable,kv_cache_type:paged,"
    "gemm_plugin:float16",
    "LLaMA 70B, TP 4, PP 2": f"generate_engines --harness_type=triton {SPREAD}"
    " --trtllm_checkpoint_flags=dtype:float16,tp_size:4,pp_size:2 --trtllm_build_flags=gemm_plugin:auto",
    "Mixtral, TP 8, EP 4": f"generate_engines --harness_type=triton {SPREAD.replace('llama', 'mixtral')}"
    " --trtllm_checkpoint_flags=dtype:float16,tp_size:8,moe_tp_size:2,moe_ep_size:4"
    " --trtllm_build_flags=gemm_plugin:float16",
    "logits": f"generate_engines --harness_type=triton {SPREAD}"
    " --trtllm_build_flags=gather_context_logits:true,gather_generation_logits:true,"
    "gather_all_token_logits:true",
    "the template of tensorrt_llm": f"generate_triton_config {ENGINE}"
    " --trtllm_runtime_flags=triton_backend:tensorrtllm,"
    "triton_max_batch_size:4,decoupled_mode:false,max_queue_delay_microseconds:0,batching_strategy:inflight_fused_batching,max_queue_size:0",
    "overlap and reuse": f"generate_triton_config {ENGINE}"
    " --trtllm_runtime_flags=enable_trt_overlap:True,enable_kv_cache_reuse:True",
    "V1 batching": f"generate_triton_config {ENGINE} --trtllm_runtime_flags=gpt_model_type:V1",
    "LLaMA 3 by hand": f"generate_triton_config {ENGINE} --scenarios=Server"
    " --trtllm_runtime_flags=max_batch_size:64,decoupled_mode:true,"
    "gpt_model_type:inflight_fused_batching,batch_scheduler_policy:max_utilization,kv_cache_free_gpu_mem_fraction:0.9",
    "no eviction": f"generate_triton_config {ENGINE}"
    " --trtllm_runtime_flags=batch_scheduler_policy:GUARANTEED_NO_EVICT",
}


def _built(flag: str, words: str) -> tuple[str, str]:
    """Return a key of --trtllm_build_flags that build.py or trtllm-build had at that time."""
    return (
        f"generate_engines --harness_type=triton {SPREAD} --trtllm_build_flags={flag}",
        f"trtllm-build has no option .*; {words}",
    )


_OTHER_MODELS = "the repository has only the tensorrt_llm model"
_RUNS = "generate-engines runs it"
_TOKENS = "`python -m mpillm triton-client tokens` takes its options"
_CORE_MODEL = "`python -m mpillm bench core-model` takes its options"
MESSAGES = {
    "disaggregation: the test before its YAML": (
        f"run_harness {DISAGG}",
        "disagg.yaml: cannot be read: No such file",
    ),
    "launch_triton_server": (
        "launch_triton_server.py --tritonserver=bin/tritonserver"
        " --model_repo=build/triton_model_repo_0"
        " --tensorrt_llm_model_name=llama3_1-405b-offline-0 --world_size=4",
        "--model_repo: build/triton_model_repo_0 has no model in it",
    ),
    "launch_triton_server in Slurm": (
        "launch_triton_server.py --oversubscribe",
        "launch-triton-server needs --model_repo DIR",
    ),
    "tritonserver": (
        "tritonserver --model-repository=/triton_model_repo",
        "run-llm-server --harness_type=triton starts it",
    ),
    "convert_checkpoint": (
        "convert_checkpoint.py --model_dir llama --dtype float16 --tp_size 1 --output_dir checkpoint",
        _RUNS,
    ),
    "trtllm-build": (
        "trtllm-build --checkpoint_dir=checkpoint --gpt_attention_plugin=float16 --output_dir=engine",
        _RUNS,
    ),
    "build.py": (
        "build.py --model_dir llama --dtype bfloat16 --use_inflight_batching --output_dir engine",
        _RUNS,
    ),
    "hf_lora_convert": (
        "hf_lora_convert.py -i adapter -o weights --storage-type float16",
        "adapter/adapter_config.json: cannot be read: No such file",
    ),
    "the client of one request": (
        "inflight_batcher_llm_client.py --request-output-len 200 --tokenizer-dir llama",
        _TOKENS,
    ),
    "early stopping": (
        "inflight_batcher_llm_client.py --stop-after-ms 200 --request-output-len 200",
        _TOKENS,
    ),
    "the client's logits": (
        "inflight_batcher_llm_client.py --return-context-logits --return-generation-logits",
        _TOKENS,
    ),
    "the client's adapters": (
        "inflight_batcher_llm_client.py --top-k 0 --top-p 0.5 --text x --lora-path weights",
        _TOKENS,
    ),
    "the client of a batch": (
        'end_to_end_grpc_client.py -o 5 -p ["a","b"] --batch-inputs',
        "`python -m mpillm triton-client text` takes its options",
    ),
    "end to end": (
        "end_to_end_test.py --dataset prompts.json",
        "`python -m mpillm e2e-test` takes its options",
    ),
    "a benchmark of a data set": (
        "benchmark_core_model.py -i grpc --request_rate 10 dataset --dataset prompts.json",
        _CORE_MODEL,
    ),
    "a benchmark of lengths": (
        "benchmark_core_model.py -i grpc --request_rate 10 token_norm_dist --input_mean 128 --input_stdev 5"
        " --output_mean 20",
        _CORE_MODEL,
    ),
    "the template of preprocessing": (
        f"generate_triton_config {ENGINE}"
        " --trtllm_runtime_flags=tokenizer_dir:llama,preprocessing_instance_count:1",
        _OTHER_MODELS,
    ),
    "the template of postprocessing": (
        f"generate_triton_config {ENGINE}"
        " --trtllm_runtime_flags=postprocessing_instance_count:1,max_queue_size:0",
        _OTHER_MODELS,
    ),
    "the template of tensorrt_llm_bls": (
        f"generate_triton_config {ENGINE} --trtllm_runtime_flags=bls_instance_count:1",
        _OTHER_MODELS,
    ),
    "an encoder's features": (
        f"generate_triton_config {ENGINE} --trtllm_runtime_flags=encoder_input_features_data_type:TYPE_FP16",
        "our tensorrt_llm model has no such tensor",
    ),
    "the engine of a template": (
        f"generate_triton_config {ENGINE} --trtllm_runtime_flags=engine_dir:engine",
        "with --engine_dir",
    ),
    "max_output_len": _built("max_output_len:1024", "use max_seq_len"),
    "context_fmha_fp32_acc": _built("context_fmha_fp32_acc:enable", "it is a runtime option now"),
    "multi_block_mode": _built("multi_block_mode:enable", "it is a runtime option now"),
    "use_inflight_batching": _built("use_inflight_batching:true", "it is a runtime option now"),
    "use_gpt_attention_plugin": _built("use_gpt_attention_plugin:bfloat16", "use gpt_attention_plugin"),
    "use_gemm_plugin": _built("use_gemm_plugin:bfloat16", "use gemm_plugin"),
    "use_layernorm_plugin": _built("use_layernorm_plugin:float16", "TensorRT-LLM has no such plugin"),
    "use_lora_plugin": _built("use_lora_plugin:float16", "use lora_plugin"),
    "enable_context_fmha": _built("enable_context_fmha:true", "use context_fmha"),
    "hidden_act": _built("hidden_act:gelu", "the checkpoint has it"),
    "dtype": _built("dtype:bfloat16", "the checkpoint has it"),
    "world_size": _built("world_size:1", "it follows from --tensor_parallelism"),
    "model_dir": _built("model_dir:llama", "name the model with --model_path"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with stand-ins for TensorRT-LLM's tools, and the models and the engine that the texts
    take for granted."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if re.match("TRTLLM_|OMPI_|PMI|SLURM_|MLPERF_", name):
            monkeypatch.delenv(name)
    make_library(Path("build/TRTLLM"))
    for path in ("llama", "build/models/Llama-2-70b-chat-hf"):
        make_model(Path(path), num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=80)
    for path in ("mixtral", "build/models/Mixtral-8x7B-Instruct-v0.1"):
        make_model(
            Path(path),
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=32,
            num_local_experts=8,
        )
    Path("engine").mkdir()
    Path("engine/config.json").write_text(
        json.dumps({"pretrained_config": {"mapping": {}}, "build_config": {"max_batch_size": 64}})
    )
    Path("engine/rank0.engine").write_bytes(b"engine")
    Path("bin").mkdir()
    for program in ("trtllm-build", "trtllm-serve", "tritonserver"):
        Path("bin", program).write_text(
            f'#!/bin/sh\nexec {sys.executable} {tmp_path}/build/TRTLLM/tensorrt_llm/commands/build.py "$@"\n'
        )
        Path("bin", program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("name", WORKS)
def test_what_works(place: Path, name: str) -> None:
    words = WORKS[name].split()
    if words[0] == "run_llm_server" and "--dry_run" not in words:
        words.append("--dry_run")
    assert main(words) == 0


@pytest.mark.parametrize("name", MESSAGES)
def test_a_refused_command_has_one_message(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    line, words = MESSAGES[name]
    before = sorted(place.rglob("*"))
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert re.search(words, captured.err), captured.err
    assert sorted(place.rglob("*")) == before, "nothing was made"


def test_adapters(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--trtllm_build_flags=lora_plugin:float16,lora_target_modules:attn_q attn_k attn_v,max_lora_rank:8"
    )
    command = ["generate_engines", "--harness_type=triton", *SPREAD.split(), flags]
    assert main([*command, "--dry_run"]) == 0
    assert " --lora_target_modules attn_q attn_k attn_v --max_lora_rank=8" in capsys.readouterr().out
    assert main(command) == 0


@pytest.mark.parametrize(
    "target", ["prebuild", "clone_trt_llm", "build_trt_llm", "clone_triton", "build_triton"]
)
def test_targets_that_prepare_a_container(target: str) -> None:
    make = subprocess.run(
        ["make", "--no-print-directory", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert make.returncode == 2 and make.stdout == ""
    assert make.stderr.startswith(f"make {target} is not built here: ")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model_repo=build/triton_model_repo_0", "it is --triton_model_repo"),
        ("--tensorrt-llm-model-name=llama3_1-405b-offline-0", "the model repository has it"),
        ("--oversubscribe", "a rank for each GPU"),
        ("--model_dir=llama", "it is --model_path"),
        ("--tp_size=4", "it is --tensor_parallelism"),
        ("--moe_ep_size=4", "it is --moe_expert_parallelism"),
        ("--gpu-memory-utilization=0.9", "--kv_cache_free_gpu_mem_fraction"),
        ("--max-model-len", "it is --max_seq_len"),
    ],
)
def test_options_of_their_programs(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run_llm_server", "generate_engines"):
        assert main([command, "--harness_type=triton", option]) == 2
        assert re.search(f"unknown option --[^;]*; .*{words}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--tp=2", "--tensor_parallelism"),
        ("--model=llama", "--model_path"),
        ("--request-rate=4", "--server_target_qps"),
        ("--base-url=http://localhost:8000", "--trtllm_server_urls"),
        ("--isl=128", "--input_mean"),
    ],
)
def test_options_of_others_are_known_where_ours_are_an_option(
    option: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", option]) == 2
    name = option.partition("=")[0].replace("-", "_").replace("__", "--", 1)
    assert f"unknown option {name}" in (error := capsys.readouterr().err) and f"; it is {ours}" in error
    assert main(["compare", option]) == 2
    assert ours not in capsys.readouterr().err


# --- cores ---


def test_names_of_cores_are_the_registrys() -> None:
    assert sorted(BUILT_IN) == BackendRegistry.names()


@pytest.mark.parametrize(
    "command",
    ["plan", "generate-engines", "generate-triton-config", "generate-disagg-config", "run-llm-server"],
)
def test_a_misspelt_core_is_one_everywhere(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--core_type=trtlm_disagg", "--world_size=4"]) == 2
    message = capsys.readouterr().err
    assert (
        "--core_type trtlm_disagg: expected torch, dummy, " in message
        and "(did you mean 'trtllm_disagg'?)" in message
    )


# --- the skeleton of the Triton harness's text, as it stands there ---

IMPORT = f"from {user_config.__name__} import *\n"


def test_the_skeleton(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The skeleton works as printed, once the import that the message names is added and 'model-name' is
    replaced by a model's name."""
    file = Path("mine.py")
    command = [
        "generate_triton_config",
        "--config_file=mine.py",
        "--benchmarks=llama2-70b",
        "--model_path=llama",
        "--dry_run",
    ]
    file.write_text(SKELETON)
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "mpillm: mine.py:1: NameError: name 'ConfigRegistry' is not defined; ConfigRegistry comes with"
        f" `{IMPORT.strip()}`, which mine.py lacks\n"
    )
    file.write_text(IMPORT + SKELETON)
    assert main(command) == 2
    assert "mine.py:19: gpu_batch_size model-name:2048: expected a batch size" in capsys.readouterr().err
    file.write_text(IMPORT + SKELETON.replace("model-name", "llama2-70b"))
    assert main(command) == 0
    assert "an engine of tp1-pp2" in capsys.readouterr().out


def test_another_name_that_is_missing_gets_no_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("x = some_name\n")
    assert main(["plan", f"--config_file={tmp_path}/mine.py", "--world_size=2"]) == 2
    assert capsys.readouterr().err.endswith("mine.py:1: NameError: name 'some_name' is not defined\n")
