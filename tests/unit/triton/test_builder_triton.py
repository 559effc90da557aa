"""Model repositories for Triton: Triton's own protobuf reads what we write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.nvidia.configs import model_name
from mpillm.triton import repository as triton
from mpillm.triton.pbtxt import EnumName, dump
from mpillm.triton.repository import model_parameters, triton_layout
from mpillm.trtllm import installed


def read(text: str) -> Any:
    model_config_pb2 = pytest.importorskip("tritonclient.grpc").model_config_pb2
    from google.protobuf import text_format

    return text_format.Parse(text, model_config_pb2.ModelConfig())


def make_engine(folder: Path, tp_size: int = 1, pp_size: int = 1, **build: int) -> Path:
    folder.mkdir()
    mapping = {"tp_size": tp_size, "pp_size": pp_size}
    (folder / "config.json").write_text(
        json.dumps(
            {"pretrained_config": {"mapping": mapping}, "build_config": {"max_batch_size": 64, **build}}
        )
    )
    for rank in range(tp_size * pp_size):
        (folder / f"rank{rank}.engine").write_bytes(b"engine")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_engine(tmp_path / "engine")
    return tmp_path


def generate(*options: str) -> int:
    return main(["generate-triton-config", "--benchmarks=llama2-70b", "--engine_dir=engine", *options])


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def gpus(monkeypatch: pytest.MonkeyPatch, n: int | None) -> None:
    for module in (installed, triton):
        monkeypatch.setattr(module, "visible_gpus", lambda: None if n is None else tuple(range(n)))


def test_what_triton_reads(place: Path) -> None:
    flags = "max_batch_size:32,batch_scheduler_policy:max_util,kvcache_free_gpu_mem_frac:0.9"
    flags += ",exclude_input_from_output:true"
    assert (
        generate(
            "--scenarios=server",
            f"--trtllm_runtime_flags={flags},enable_chunked_context:false,decoding_mode:top_k_top_p",
        )
        == 0
    )
    assert sorted(
        str(p.relative_to("build/triton_model_repo_0")) for p in Path("build/triton_model_repo_0").rglob("*")
    ) == [
        "llama2-70b-server-0",
        "llama2-70b-server-0/1",
        "llama2-70b-server-0/config.pbtxt",
        "mpillm-stamp.json",
    ]
    config = read(Path("build/triton_model_repo_0/llama2-70b-server-0/config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("llama2-70b-server-0", "tensorrtllm", 32)
    assert config.model_transaction_policy.decoupled
    assert list(config.dynamic_batching.preferred_batch_size) == [32]
    tensors = {tensor.name: tensor for tensor in config.input}
    assert (
        list(tensors["input_ids"].dims) == [-1]
        and tensors["input_ids"].allow_ragged_batch
        and tensors["input_ids"].optional
        and not tensors["input_lengths"].optional
    )
    assert tensors["streaming"].optional and tensors["streaming"].HasField("reshape")
    assert (len(config.input), len(config.output)) == (62, 21), "as the template of release 1.3.0rc20"
    assert [tensor.name for tensor in config.output][:2] == ["output_ids", "sequence_length"]
    values = parameters(config)
    assert values["gpt_model_type"] == "inflight_fused_batching"
    assert values["gpt_model_path"] == str(place / "engine")
    assert values["batch_scheduler_policy"] == "max_utilization"
    assert values["kv_cache_free_gpu_mem_fraction"] == "0.9"
    assert values["exclude_input_in_output"] == "true" and values["enable_chunked_context"] == "false"
    assert values["enable_kv_cache_reuse"] == "false"
    assert values["decoding_mode"] == "top_k_top_p" and values["gpu_device_ids"] == "0"


# What TensorRT-LLM's backend reads outside of any `try` when it makes a model instance: one that is missing
# ends the load.
NEEDED = ("gpt_model_type", "tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")


def test_no_parameter_is_missing_without_which_the_backend_does_not_load(place: Path) -> None:
    assert generate() == 0
    values = parameters(read(Path("build/triton_model_repo_0/llama2-70b-offline-0/config.pbtxt").read_text()))
    assert {name: values.get(name) for name in NEEDED[1:]} == {name: f"${{{name}}}" for name in NEEDED[1:]}, (
        "as in an unfilled template"
    )
    assert values["gpt_model_type"] in ("V1", "inflight_fused_batching")


def test_a_parameter_of_these_that_has_a_value(place: Path) -> None:
    (place / "info.json").write_text("{}")
    flags = (
        "tokenizer_dir:/models/llama,guided_decoding_backend:xgrammar,xgrammar_tokenizer_info_path:info.json"
    )
    assert generate(f"--trtllm_runtime_flags={flags}") == 0
    values = parameters(read(Path("build/triton_model_repo_0/llama2-70b-offline-0/config.pbtxt").read_text()))
    assert [values[name] for name in NEEDED[1:]] == ["/models/llama", str(place / "info.json"), "xgrammar"]


def test_every_parameter_of_the_template_can_be_set(place: Path) -> None:
    """Every parameter that TensorRT-LLM 1.x's template fills in can be set by its name there."""
    flags = (
        "triton_backend:tensorrtllm,triton_max_batch_size:8,decoupled_mode:true,max_queue_delay_microseconds:10,max_queue_size:4,"
        "max_beam_width:2,batching_strategy:V1,encoder_engine_dir:/encoder,max_tokens_in_paged_kv_cache:100,max_attention_window_size:10,"
        "sink_token_length:4,batch_scheduler_policy:max_utilization,kv_cache_free_gpu_mem_fraction:0.5,cross_kv_cache_fraction:0.5,"
        "kv_cache_host_memory_bytes:1,kv_cache_onboard_blocks:false,enable_trt_overlap:true,exclude_input_in_output:false,"
        "cancellation_check_period_ms:1,stats_check_period_ms:2,iter_stats_max_iterations:3,request_stats_max_iterations:4,"
        "enable_kv_cache_reuse:true,normalize_log_probs:false,enable_chunked_context:true,participant_ids:0,num_nodes:1,"
        "lora_cache_optimal_adapter_size:8,lora_cache_max_adapter_size:64,lora_cache_gpu_memory_fraction:0.1,"
        "lora_cache_host_memory_bytes:5,lora_prefetch_dir:/lora,decoding_mode:lookahead,lookahead_window_size:1,lookahead_ngram_size:2,"
        "lookahead_verification_set_size:3,medusa_choices:{{0}},eagle_choices:{{0}},gpu_weights_percent:0.5,"
        "enable_context_fmha_fp32_acc:true,multi_block_mode:false,cuda_graph_mode:true,cuda_graph_cache_size:6,"
        "speculative_decoding_fast_logits:true,executor_worker_path:/worker,recv_poll_period_ms:7"
    )
    make_engine(place / "beams", max_beam_width=2)
    assert generate("--engine_dir=beams", f"--trtllm_runtime_flags={flags}") == 0
    config = read(Path("build/triton_model_repo_0/llama2-70b-offline-0/config.pbtxt").read_text())
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (8, True)
    assert config.dynamic_batching.max_queue_delay_microseconds == 10
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 4
    written = parameters(config)
    given = dict(pair.split(":") for pair in flags.split(","))
    elsewhere = (
        "triton_backend",
        "triton_max_batch_size",
        "decoupled_mode",
        "max_queue_delay_microseconds",
        "max_queue_size",
    )
    renamed = {"batching_strategy": "gpt_model_type", "encoder_engine_dir": "encoder_model_path"}
    for name, value in given.items():
        if name not in elsewhere:
            assert written[renamed.get(name, name)] == value, name


def test_offline_is_not_decoupled_and_the_environment_counts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "batch_scheduler_policy:no_evict,use_inflight_batching:false")
    options = ("--trtllm_runtime_flags=batch_scheduler_policy:max_util", "--enable_kv_cache_reuse")
    assert generate("--scenarios=offline", "--harness_type=triton", *options) == 0
    config = read(Path("build/triton_model_repo_0/llama2-70b-offline-0/config.pbtxt").read_text())
    assert not config.model_transaction_policy.decoupled and config.max_batch_size == 64  # the engine's
    assert (
        parameters(config)["batch_scheduler_policy"] == "guaranteed_no_evict"
        and parameters(config)["gpt_model_type"] == "V1"
    )
    assert parameters(config)["enable_kv_cache_reuse"] == "true"


@pytest.mark.parametrize(
    ("scenario", "options", "expected"),
    [
        ("Offline", (), [["0,1", "2,3", "4,5", "6,7"]]),
        ("Server", (), [["0,1"], ["2,3"], ["4,5"], ["6,7"]]),
        ("Server", ("--triton_num_servers=2",), [["0,1", "2,3"], ["4,5", "6,7"]]),
        ("Offline", ("--triton_num_models_per_server=2",), [["0,1", "2,3"], ["4,5", "6,7"]]),
        ("Offline", ("--triton_num_servers=1", "--triton_num_models_per_server=3"), [["0,1", "2,3", "4,5"]]),
    ],
)
def test_servers_models_and_gpus(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    options: tuple[str, ...],
    expected: list[list[str]],
) -> None:
    gpus(monkeypatch, 8)
    make_engine(place / "two", tp_size=2)
    assert generate(f"--scenarios={scenario}", "--engine_dir=two", *options) == 0
    found = []
    for repo in sorted(Path("build").glob("triton_model_repo_?")):
        models = sorted(repo.glob("*/config.pbtxt"))
        found.append([parameters(read(path.read_text()))["gpu_device_ids"] for path in models])
    assert found == expected


def test_fewer_servers_than_before_leave_no_repository_of_the_old(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 2)
    assert generate("--scenarios=Server") == 0
    assert sorted(path.name for path in Path("build").glob("*_?")) == [
        "triton_model_repo_0",
        "triton_model_repo_1",
    ]
    assert generate("--scenarios=Offline") == 0
    assert sorted(path.name for path in Path("build").glob("*_?")) == ["triton_model_repo_0"]


def test_an_edited_file_is_kept_until_something_changes(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate()
    file = Path("build/triton_model_repo_0/llama2-70b-offline-0/config.pbtxt")
    file.write_text(file.read_text() + "# mine\n")
    generate()
    assert "# mine" in file.read_text()
    generate("--trtllm_runtime_flags=max_batch_size:2")
    assert "# mine" not in file.read_text()


WRONG = {
    "no engine": (("--engine_dir=nowhere",), "--engine_dir nowhere: no such folder"),
    "a parameter": (
        ("--trtllm_runtime_flags=max_beam_widht:1",),
        r"no parameter 'max_beam_widht' \(did you mean 'max_beam_width'\?\)",
    ),
    "a policy": (
        ("--trtllm_runtime_flags=batch_scheduler_policy:static",),
        "batch_scheduler_policy static: Triton's backend has max_util and no_evict",
    ),
    "a batch": (
        ("--trtllm_runtime_flags=max_batch_size:65",),
        "max_batch_size 65: the engine in .* was built for 64",
    ),
    "a value that the backend would pass over": (
        ("--trtllm_runtime_flags=cuda_graph_mode:on",),
        "cuda_graph_mode on: expected true or false",
    ),
    "a number that is none": (
        ("--trtllm_runtime_flags=sink_token_length:few",),
        "sink_token_length few: expected a whole number",
    ),
    "a mode of decoding": (
        ("--trtllm_runtime_flags=decoding_mode:top_p_top_k",),
        r"decoding_mode top_p_top_k: not one of .* \(did you mean",
    ),
    "what lookahead needs": (
        ("--trtllm_runtime_flags=decoding_mode:lookahead,lookahead_ngram_size:2",),
        "decoding_mode lookahead needs lookahead_window_size and lookahead_verification_set_size",
    ),
    "a backend for guided decoding": (
        ("--trtllm_runtime_flags=guided_decoding_backend:outlines",),
        "guided_decoding_backend outlines: not one of xgrammar",
    ),
    "a file for guided decoding": (
        (
            "--trtllm_runtime_flags=guided_decoding_backend:xgrammar,xgrammar_tokenizer_info_path:nowhere.json",
        ),
        "xgrammar_tokenizer_info_path .*nowhere.json: no such file",
    ),
    "a number as a file": (
        ("--trtllm_runtime_flags=xgrammar_tokenizer_info_path:5",),
        "xgrammar_tokenizer_info_path 5: no such file",
    ),
    "what the embedded engine lacks": (
        ("--model_path=tiny-llama", "--trtllm_runtime_flags=triton_backend:python,decoding_mode:medusa"),
        "decoding_mode: 'medusa': the embedded engine has no such thing",
    ),
    "no instances": (
        (
            "--model_path=tiny-llama",
            "--triton_text_models",
            "--trtllm_runtime_flags=triton_backend:python,bls_instance_count:0",
        ),
        "bls_instance_count 0: expected a whole number of at least 1",
    ),
    "another backend": (
        ("--trtllm_runtime_flags=triton_backend:pytorch",),
        "triton_backend pytorch: not one of tensorrtllm, python",
    ),
    "tokens that can't stream": (
        ("--scenarios=Server", "--trtllm_runtime_flags=decoupled_mode:false"),
        "decoupled_mode false: Server streams tokens, which a model does only when it is decoupled",
    ),
    "two batches": (
        ("--trtllm_runtime_flags=max_batch_size:4,triton_max_batch_size:8",),
        "triton_max_batch_size 8, but max_batch_size 4",
    ),
    "a tensor that is not there": (
        ("--trtllm_runtime_flags=encoder_input_features_data_type:TYPE_FP16",),
        "encoder_input_features_data_type: .* has no such tensor",
    ),
    "another model of the repository": (
        ("--trtllm_runtime_flags=preprocessing_instance_count:1",),
        "preprocessing_instance_count: .* only the tensorrt_llm model",
    ),
    "beams": (
        ("--trtllm_runtime_flags=max_beam_width:4",),
        "max_beam_width 4: the engine in .* was built for 1",
    ),
    "another engine": (
        ("--trtllm_runtime_flags=engine_dir:/other",),
        "engine_dir: name the engine with --engine_dir",
    ),
    "one thing twice": (
        ("--trtllm_runtime_flags=batching_strategy:V1,use_inflight_batching:true",),
        "use_inflight_batching True, but batching_strategy V1",
    ),
    "two tests": (("--scenarios=Offline,Server",), "name one workload and one scenario"),
    "GPUs": (("--triton_num_servers=3",), "must divide 8, the number of models that fit 8 GPUs"),
    "more GPUs": (
        ("--triton_num_servers=3", "--triton_num_models_per_server=3"),
        "needs 9 GPUs; 8 are visible",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    gpus(monkeypatch, 8)
    options, message = WRONG[name]
    assert generate(*options) == 2
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(capsys.readouterr().err)
    assert not Path("build").exists()


def test_a_dry_run_needs_neither_engine_nor_gpus(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, 1)
    options = (
        "--engine_dir=later",
        "--tensor_parallelism=2",
        "--triton_num_servers=1",
        "--triton_num_models_per_server=2",
        "--dry_run",
    )
    assert generate(*options) == 0
    assert capsys.readouterr().out.splitlines() == [
        "# assumed: later, an engine of tp2-pp1 (from the options)",
        "# triton-config: build/triton_model_repo_0 (not there)",
        f"# can't run here: --engine_dir {place / 'later'}: no such folder; generate-engines makes it",
        "# writes build/triton_model_repo_0/llama2-70b-offline-0/config.pbtxt",
        "# writes build/triton_model_repo_0/llama2-70b-offline-1/config.pbtxt",
    ]
    make_engine(place / "later", tp_size=2)
    assert generate(*options) == 0
    assert (
        "# can't run here: --triton_num_servers 1 with 2 models each, 2 GPUs a model, needs 4 GPUs; 1 are"
        in capsys.readouterr().out
    )
    assert not Path("build").exists()


def test_an_incomplete_engine(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_engine(place / "two", tp_size=2)
    (place / "two/rank1.engine").unlink()
    assert generate("--engine_dir=two") == 2
    assert "there is no rank1.engine in it, and its config.json says tp2-pp1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"pretrained_config": []}', "pretrained_config: []; must be an object"),
        (
            '{"pretrained_config": {"mapping": {"tp_size": "2"}}}',
            'pretrained_config: mapping: tp_size: "2"; must be a whole number',
        ),
        (
            '{"build_config": {"max_batch_size": "many"}}',
            'build_config: max_batch_size: "many"; must be a whole number',
        ),
    ],
)
def test_an_engine_whose_config_is_wrong(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (place / "engine/config.json").write_text(text)
    assert generate() == 2
    assert f"engine/config.json: {message}" in capsys.readouterr().err


def test_names_and_parameters() -> None:
    assert model_name("llama3.1-405b", "Offline", 0) == "llama3_1-405b-offline-0"
    written = model_parameters(
        {
            "max_attention_window_size": 4096,
            "context_chunking_policy": "equal_progress",
            "cuda_graph_mode": True,
        }
    )
    assert {name: value for name, value in written.items() if name not in NEEDED} == {
        "max_attention_window_size": "4096",
        "cuda_graph_mode": "true",
    }
    assert triton_layout("Offline", 2, 3, 4).gpus(5) == range(10, 12)


@pytest.mark.long
@given(st.text())
def test_any_text_survives(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair is no text
        return
    config = read(
        dump(
            {
                "name": text,
                "max_batch_size": 1,
                "instance_group": [{"kind": EnumName("KIND_CPU"), "count": 2}],
            }
        )
    )
    assert config.name == text and config.instance_group[0].count == 2


def test_values_that_have_no_text() -> None:
    for value in (float("nan"), None, object()):
        with pytest.raises(TypeError, match="has no text in protobuf's format"):
            dump({"name": value})


def test_templates_that_are_filled_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines of TensorRT-LLM's README change the files of generate-triton-config."""
    monkeypatch.chdir(tmp_path)
    gpus(monkeypatch, None)
    flags = (
        "--trtllm_runtime_flags=triton_backend:python,preprocessing_instance_count:3,enable_trt_overlap:true"
    )
    words = ["--model_path=tiny-llama", "--triton_model_repo=repo", "--triton_text_models", flags]
    assert main(["generate-triton-config", "--triton_num_servers=1", *words]) == 0
    assert "without effect on the embedded engine: enable_trt_overlap: true" in capsys.readouterr().err

    def model(name: str) -> Any:
        return read((tmp_path / "repo_0" / name / "config.pbtxt").read_text())

    assert model("preprocessing").instance_group[0].count == 3
    assert model("postprocessing").instance_group[0].count == 1
    for name, values in {
        "ensemble": "triton_max_batch_size:4",
        "preprocessing": "tokenizer_dir:/a b,triton_max_batch_size:4,preprocessing_instance_count:2",
        "postprocessing": "tokenizer_dir:/b,triton_max_batch_size:4,postprocessing_instance_count:5"
        ",max_queue_size:6",
        "tensorrt_llm_bls": "triton_max_batch_size:4,decoupled_mode:true,bls_instance_count:7",
        "tensorrt_llm": "triton_max_batch_size:4,decoupled_mode:true,batching_strategy:V1,max_queue_size:8",
    }.items():
        file = str(tmp_path / "repo_0" / name / "config.pbtxt")
        assert main(["fill-template", "-i", file, values]) == 0, name
        assert capsys.readouterr() == ("", "")
        assert model(name).max_batch_size == 4
    assert parameters(model("preprocessing"))["tokenizer_dir"] == "/a b"
    counts = {"preprocessing": 2, "postprocessing": 5, "tensorrt_llm_bls": 7, "tensorrt_llm": 1}
    assert {name: model(name).instance_group[0].count for name in counts} == counts
    assert model("postprocessing").dynamic_batching.default_queue_policy.max_queue_size == 6
    engine = model("tensorrt_llm")
    assert list(engine.dynamic_batching.preferred_batch_size) == [4]
    assert engine.dynamic_batching.default_queue_policy.max_queue_size == 8
    assert engine.model_transaction_policy.decoupled and parameters(engine)["gpt_model_type"] == "V1"
    file = str(tmp_path / "repo_0/ensemble/config.pbtxt")
    assert main(["fill-template", "-i", file, "preprocessing_instance_count:2"]) == 2
    assert "has no placeholder 'preprocessing_instance_count'" in capsys.readouterr().err


def test_an_embedded_engine_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank has a server, of which one serves; or one server starts the other rank."""
    monkeypatch.chdir(tmp_path)
    gpus(monkeypatch, None)
    flags = "--trtllm_runtime_flags=triton_backend:python"
    words = ["--model_path=tiny-llama", "--triton_model_repo=repo", flags]
    generated = ["generate-triton-config", "--scenarios=Server", *words, "--triton_text_models"]
    assert main([*generated, "--pipeline_parallelism=2"]) == 2
    assert "behind Triton the embedded engine has one stage" in capsys.readouterr().err
    assert main([*generated, "--tensor_parallelism=2"]) == 0
    written = parameters(read((tmp_path / "repo_0/tensorrt_llm/config.pbtxt").read_text()))
    assert json.loads(written["core_config"])["tp_size"] == 2 and written["gpu_device_ids"] == "0,1"
    assert written["executor_worker_path"] == sys.executable
    served = ["run-llm-server", "--core_type=triton_grpc", "--triton_model_repo=repo", "--dry_run"]
    served.append(f"--tritonserver={sys.executable}")  # any program
    capsys.readouterr()
    assert main(served) == 0
    first, second = capsys.readouterr().out.split(" : -n 1 ")
    assert "mpirun" in first and first.count(" -n 1 ") == 1 and "--load-model" not in first
    assert second.count("--load-model") == 1 and "--load-model=tensorrt_llm " in second
    assert main([*served, "--triton_orchestrator"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("TRTLLM_ORCHESTRATOR=1 ") and "mpirun" not in line and " : " not in line
