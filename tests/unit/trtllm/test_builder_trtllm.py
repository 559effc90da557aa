"""generate-engines drives TensorRT-LLM's tools; stand-ins for them are in trtllm_stand_in."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.cores import torch_stage
from mpillm.llmlib import builder
from mpillm.options.fields import AllFields
from mpillm.options.mitten import Configuration
from mpillm.stages.checkpoint import QuantizerConfig
from mpillm.stages.torch_engine import TorchBuilderOp, TorchQuantizerOp
from mpillm.trtllm import installed
from mpillm.trtllm.engines import TRTLLMBuilderOp, TRTLLMLibraryLoader, TRTLLMQuantizerOp
from mpillm.trtllm.tool_options import BUILD, CONVERT, QUANTIZE
from tests.helpers.configured import from_fields
from tests.helpers.trtllm_stand_in import make_library, make_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model and a library, in which commands run."""
    make_library(tmp_path / "TRTLLM")
    make_model(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    for name in ("TRTLLM_CHECKPOINT_FLAGS", "TRTLLM_BUILD_FLAGS", "TRTLLM_RUNTIME_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


OPTIONS = (
    "--core_type=triton_grpc",
    "--model_path=llama",
    "--trtllm_lib_path=TRTLLM",
    "--llm_quantizer_outdir=ckpt",
    "--engine_dir=engine",
)


def generate(*options: str) -> int:
    return main(["generate-engines", *OPTIONS, *options])


def test_the_whole_chain_and_its_stamp(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--trtllm_checkpoint_flags=qformat:fp8,kv_cache_dtype:fp8,calib_size:64"
    assert (
        generate(
            flags,
            "--trtllm_build_flags=max_num_tokens:1024,use_paged_context_fmha:true,tensor_parallelism:2",
            "--gpu_batch_size=16",
        )
        == 0
    )
    assert sorted(path.name for path in Path("engine").iterdir()) == [
        "config.json",
        "mpillm-stamp.json",
        "rank0.engine",
        "rank1.engine",
    ]
    assert json.loads(Path("ckpt/config.json").read_text())["quantization"] == {"quant_algo": "fp8"}
    engine = json.loads(Path("engine/config.json").read_text())
    assert engine["build_config"]["max_num_tokens"] == 1024 and engine["build_config"]["max_batch_size"] == 16
    assert engine["pretrained_config"]["mapping"] == {"tp_size": 2, "pp_size": 1}
    (command,) = json.loads(Path("engine/mpillm-stamp.json").read_text())["commands"]
    assert command.endswith(
        "--checkpoint_dir=ckpt --output_dir=engine --max_batch_size=16 --max_num_tokens=1024 --workers=2"
        " --use_paged_context_fmha=enable"
    )
    capsys.readouterr()
    assert (
        generate(
            flags,
            "--trtllm_build_flags=max_num_tokens:1024,use_paged_context_fmha:true,tensor_parallelism:2",
            "--gpu_batch_size=16",
        )
        == 0
    )
    assert capsys.readouterr().out.count("is up to date") == 2
    # Another build flag is another engine of the same checkpoint.
    assert (
        generate(
            flags,
            "--trtllm_build_flags=max_num_tokens:2048,use_paged_context_fmha:true,tensor_parallelism:2",
            "--gpu_batch_size=16",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "ckpt is up to date" in out and "engine (flags has changed" in out


def test_without_qformat_the_checkpoint_is_converted(place: Path) -> None:
    assert generate("--trtllm_checkpoint_flags=dtype:bfloat16", "--pipeline_parallelism=2") == 0
    (command,) = json.loads(Path("ckpt/mpillm-stamp.json").read_text())["commands"]
    assert (
        "convert_checkpoint.py --model_dir=llama --output_dir=ckpt --tp_size=1 --pp_size=2 --dtype=bfloat16"
        in command
    )
    assert Path("engine/rank1.engine").is_file()


def test_each_family_has_its_converter(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(place / "qwen", "Qwen3MoeForCausalLM", num_experts=8)
    qwen = ("--model_path=qwen", "--tensor_parallelism=2", "--moe_expert_parallelism=2")
    assert generate(*qwen, "--trtllm_checkpoint_flags=dtype:bfloat16") == 0
    (command,) = json.loads(Path("ckpt/mpillm-stamp.json").read_text())["commands"]
    wanted = "core/qwen/convert_checkpoint.py --model_dir=qwen --output_dir=ckpt --tp_size=2 --pp_size=1"
    assert f"{wanted} --moe_tp_size=1 --moe_ep_size=2 --dtype=bfloat16" in command
    make_model(place / "gemma", "Gemma3ForCausalLM")
    assert generate("--model_path=gemma", "--tensor_parallelism=2", "--dry_run") == 0
    wanted = "core/gemma/convert_checkpoint.py --model_dir=gemma --output_dir=ckpt"
    assert f"{wanted} --ckpt-type=hf --world-size=2" in capsys.readouterr().out
    for options, message in (
        (
            ("--model_path=gemma", "--pipeline_parallelism=2"),
            "gemma's convert_checkpoint.py has no option for it",
        ),
        (
            ("--model_path=gemma", "--trtllm_checkpoint_flags=tp:2"),
            "gemma's convert_checkpoint.py has no option",
        ),
    ):
        assert generate(*options, "--dry_run") == 2
        assert message in capsys.readouterr().err


def test_a_family_without_a_converter_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(place / "oss", "GptOssForCausalLM", num_local_experts=8)
    assert generate("--model_path=oss") == 2
    assert (
        "TensorRT-LLM has no convert_checkpoint.py for GptOssForCausalLM; it has" in capsys.readouterr().err
    )
    assert not Path("ckpt").exists()


def test_experts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(place / "mixtral", num_local_experts=8)
    options = ("--model_path=mixtral", "--tensor_parallelism=4", "--moe_expert_parallelism=2")
    assert generate(*options, "--dry_run") == 0
    assert "--tp_size=4 --pp_size=1 --moe_tp_size=2 --moe_ep_size=2" in capsys.readouterr().out
    assert generate(*options, "--trtllm_checkpoint_flags=qformat:fp8") == 2
    assert "quantize.py has no expert parallelism" in capsys.readouterr().err
    assert generate(*options[:1], "--tensor_parallelism=2", "--moe_expert_parallelism=4") == 2
    assert (
        "--moe_expert_parallelism 4: it splits the TP group of --tensor_parallelism 2"
        in capsys.readouterr().err
    )


def test_kv_heads(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(place / "grouped", num_attention_heads=12, num_key_value_heads=6)
    assert generate("--model_path=grouped", "--tensor_parallelism=4") == 2
    assert (
        "--tensor_parallelism 4: the model has 6 KV heads, which it does not divide"
        in capsys.readouterr().err
    )
    assert generate("--model_path=grouped", "--tensor_parallelism=12", "--dry_run") == 0  # each KV head twice


def test_the_environment_is_laid_over_the_flags(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTLLM_CHECKPOINT_FLAGS", "kv_cache_dtype:int8")
    monkeypatch.setenv("TRTLLM_BUILD_FLAGS", "max_num_tokens:512")
    generate(
        "--trtllm_checkpoint_flags=qformat:fp8,kv_cache_dtype:fp8",
        "--trtllm_build_flags=max_num_tokens:1024,max_beam_width:1",
        "--dry_run",
    )
    out = capsys.readouterr().out
    assert "--qformat=fp8 --kv_cache_dtype=int8" in out
    assert "--max_num_tokens=512 --max_beam_width=1" in out


def test_the_quantizers_library_may_be_another(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_library(place / "fork")
    generate("--quantizer_lib_path_override=fork", "--trtllm_checkpoint_flags=qformat:fp8", "--dry_run")
    out = capsys.readouterr().out
    assert "fork/examples/quantization/quantize.py" in out and "TRTLLM/tensorrt_llm/commands/build.py" in out


def test_a_dry_run_needs_no_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    options = (
        "generate-engines",
        "--core_type=triton_grpc",
        "--model_path=llama",
        "--llm_quantizer_outdir=ckpt",
        "--engine_dir=engine",
    )
    assert main([*options, "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("#")] == [
        "# quantize",
        "# can't run here",
        "# build",
        "# can't run here",
    ]
    assert (
        "build/TRTLLM/examples/models/core/llama/convert_checkpoint.py --model_dir=llama --output_dir=ckpt"
        in lines[2]
    )
    assert lines[5].startswith("trtllm-build --checkpoint_dir=ckpt --output_dir=engine")
    assert main([*options, "--trtllm_build_flags=max_num_token:1", "--dry_run"]) == 2
    assert "trtllm-build has no option 'max_num_token'" in capsys.readouterr().err
    assert main([*options]) == 2
    assert "--trtllm_lib_path: no examples" in capsys.readouterr().err


def test_a_dry_run_does_nothing_and_its_lines_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    assert generate("--trtllm_checkpoint_flags=qformat:fp8", "--dry_run") == 0
    assert sorted(place.rglob("*")) == before
    subprocess.run(["sh", "-e", "-c", capsys.readouterr().out], check=True, capture_output=True)
    assert Path("engine/rank0.engine").is_file()


def test_the_pytorch_backend_reads_hugging_face_folders(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "generate-engines",
        "--core_type=trtllm_endpoint",
        "--model_path=llama",
        "--trtllm_lib_path=TRTLLM",
        "--llm_quantizer_outdir=hf",
    )
    assert main([*options, "--trtllm_checkpoint_flags=qformat:fp8"]) == 0
    assert sorted(path.name for path in Path("hf").iterdir()) == [
        "config.json",
        "model.safetensors",
        "mpillm-stamp.json",
    ]
    assert main([*options]) == 2
    assert "there is nothing to make" in capsys.readouterr().err


WRONG = {
    "a misspelt build flag": (
        ("--trtllm_build_flags=max_num_token:1",),
        r"no option 'max_num_token' \(did"
        r" you mean 'max_num_tokens'\?\)",
    ),
    "a flag of an old release": (("--trtllm_build_flags=max_output_len:1",), "use max_seq_len"),
    "a flag of ours": (("--trtllm_build_flags=output_dir:x",), "output_dir is set by --engine_dir"),
    "a value that the tool lacks": (
        ("--trtllm_checkpoint_flags=qformat:fp9",),
        r"qformat fp9: not one of .*"
        r" \(did you mean 'fp8'\?\)",
    ),
    "text for a number": (
        ("--trtllm_build_flags=max_num_tokens:many",),
        "max_num_tokens many: expected a whole number",
    ),
    "no key:value": (("--trtllm_build_flags=max_num_tokens",), "'max_num_tokens' is not key:value"),
    "a type that the tool has as a flag": (
        ("--quantization=fp8",),
        "--quantization fp8: triton_grpc does not take it; use",
    ),
    "two engines in one folder": (
        ("--benchmarks=llama2,moe",),
        "quantize would write to ckpt, quantize to ckpt: give each",
    ),
    "two parallel sizes": (
        ("--tensor_parallelism=2", "--trtllm_build_flags=tensor_parallelism:4"),
        "is 4, but tensor_parallelism is 2",
    ),
    "heads": (
        ("--tensor_parallelism=3",),
        "--tensor_parallelism 3: the model has 8 attention heads, which it does not divide",
    ),
    "layers": (("--pipeline_parallelism=5",), "--pipeline_parallelism 5: the model has 4 layers"),
    "no experts": (("--moe_expert_parallelism=2", "--tensor_parallelism=2"), "the model has no experts"),
    "no such model": (("--model_path=nowhere",), "--model_path nowhere: no such folder"),
    "no such library": (("--trtllm_lib_path=nowhere",), "--trtllm_lib_path: no .* in nowhere"),
    "no room for an answer": (
        ("--trtllm_build_flags=max_seq_len:10,max_input_len:10",),
        "leaves no token of max_seq_len 10",
    ),
    "no engine for this core": (
        ("--core_type=dummy",),
        "--core_type dummy: nothing to build; generate-engines builds for torch",
    ),
    "no such core": (("--core_type=torhc",), "torhc: expected torch, dummy, .*did you mean 'torch'"),
    "one folder for two": (
        ("--llm_quantizer_outdir=x", "--engine_dir=x"),
        "would write to x, quantize to x: give each its own folder",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_reported_before_anything_is_made(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    options, message = WRONG[name]
    before = sorted(place.rglob("*"))
    assert generate(*options) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "message"), [("model_path: nowhere", "no such folder"), ("core_type: dummy", "nothing to build")]
)
def test_bad_input_of_a_file_names_it(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    Path("mine.yaml").write_text(f"llm_quantizer_outdir: ckpt\n{text}\n")
    assert main(["generate-engines", "--config_file=mine.yaml"]) == 2
    err = capsys.readouterr().err
    assert message in err and f"{text.partition(':')[0]} is set by mine.yaml:2" in err


def test_a_model_without_weights_and_one_without_config(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "llama/model.safetensors").unlink()
    assert generate() == 2
    assert "--model_path llama: no weights" in capsys.readouterr().err
    (place / "llama/config.json").unlink()
    assert generate() == 2
    assert "--model_path llama: there is no config.json in it" in capsys.readouterr().err


def test_a_tool_that_is_missing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(place))
    make_library(place / "build/TRTLLM")  # one of the places where it is looked for
    assert main(["generate-engines", "--harness_type=triton", "--model_path=llama"]) == 2
    assert "there is no trtllm-build beside" in capsys.readouterr().err


def test_too_little_disk_and_too_few_gpus(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "visible_gpus", lambda: ())
    assert generate() == 2
    assert "trtllm-build needs 1 GPU; 0 are visible here" in capsys.readouterr().err
    monkeypatch.setattr(installed, "visible_gpus", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1, used=1, free=1))
    assert generate() == 2
    assert "GB are free on that disk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "message"),
    [("fails", "CUDA out of memory"), ("forgets", "quantize: did not write rank0.safetensors")],
)
def test_no_success_without_the_files(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, message: str
) -> None:
    monkeypatch.setenv("STAND_IN", mode)
    assert generate("--trtllm_checkpoint_flags=qformat:fp8") == 1
    assert message in capsys.readouterr().err
    assert not Path("ckpt").exists() and not Path("engine").exists()


def test_ctrl_c_during_a_build_leaves_no_half_output(place: Path) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "mpillm", "generate-engines", *OPTIONS],
        env={**os.environ, "STAND_IN": "hangs", "PYTHONPATH": str(ROOT)},
    )
    end = time.monotonic() + 30
    while not list(place.glob(".ckpt.*/made/rank0.safetensors")):
        assert time.monotonic() < end
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    assert command.wait(300) == 128 + signal.SIGINT
    assert sorted(path.name for path in place.iterdir()) == ["TRTLLM", "ckpt.log", "llama"]


def test_values_by_the_configurator(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument goes before the command line, that before the configuration, and that before the default,
    as the reference text says."""
    values = {
        AllFields.model_path: "llama",
        AllFields.trtllm_checkpoint_flags: {"qformat": "fp8", "calib_size": 8},
        AllFields.trtllm_lib_path: "TRTLLM",
    }
    with Configuration(values, options={}).autoapply():
        assert QuantizerConfig().flags == {"qformat": "fp8", "calib_size": 8}
        assert QuantizerConfig(flags={"qformat": "int4_awq"}).qformat == "int4_awq"
        assert (
            TRTLLMBuilderOp(build_flags={"max_beam_width": 2}).commands(Path("e"))[0].argv[-1]
            == "--max_beam_width=2"
        )
    with Configuration(values, options={"trtllm_checkpoint_flags": "qformat:nvfp4"}).autoapply():
        assert QuantizerConfig().flags == {"qformat": "nvfp4"}
    monkeypatch.setenv("TRTLLM_CHECKPOINT_FLAGS", "calib_size:16")
    assert builder.QuantizerConfig is QuantizerConfig and builder.TRTLLMBuilderOp is TRTLLMBuilderOp
    assert from_fields(QuantizerConfig, config=Configuration(values, options={})).flags == {
        "qformat": "fp8",
        "calib_size": 16,
    }


def test_the_environment_is_laid_over_flags_whatever_way_they_came(
    place: Path, monkeypatch: pytest.MonkeyPatch, command_line: list[str]
) -> None:
    """Only the two classes that own the flags in llmlib's text do so."""
    monkeypatch.setenv("TRTLLM_CHECKPOINT_FLAGS", "calib_size:16,tp_size:2")
    monkeypatch.setenv("TRTLLM_BUILD_FLAGS", "max_beam_width:3,pp_size:2")
    given = {"calib_size": 8, "qformat": "fp8"}
    over = {"calib_size": 16, "qformat": "fp8"}
    assert QuantizerConfig("llama", flags=given).flags == over
    assert QuantizerConfig("llama").flags == {"calib_size": 16}
    quantizer = TRTLLMQuantizerOp(QuantizerConfig("llama", flags=given))
    assert str(quantizer.layout) == "tp2-pp1", "of TRTLLM_CHECKPOINT_FLAGS alone"
    assert TRTLLMBuilderOp(quantizer, build_flags={"max_beam_width": 1}).build_flags["max_beam_width"] == 3
    with Configuration({AllFields.model_path: "llama", AllFields.trtllm_checkpoint_flags: given}).autoapply():
        assert QuantizerConfig().flags == QuantizerConfig(flags=given).flags == over
        built = TRTLLMBuilderOp(build_flags={"max_beam_width": 1, "max_num_tokens": 5})
        assert built.build_flags == {"max_beam_width": 3, "max_num_tokens": 5, "workers": 4}
        assert str(built.layout) == "tp2-pp2"
        assert str(TRTLLMLibraryLoader().layout) == "tp1-pp1", "another class"
    command_line += ["--trtllm_checkpoint_flags=calib_size:4"]
    assert QuantizerConfig.from_fields("llama").flags == {"calib_size": 16}  # type: ignore[attr-defined]


def test_flags_in_the_tools_words() -> None:
    assert QUANTIZE.arguments(
        {"quantize_lm_head": True, "quant_medusa_head": False, "kv_cache_dtype": None}, "x"
    ) == ["--quantize_lm_head"]
    assert CONVERT.arguments(
        {"use_weight_only": True, "weight_only_precision": "int4", "smoothquant": 0.5}, "x"
    ) == [
        "--use_weight_only",
        "--weight_only_precision=int4",
        "--smoothquant=0.5",
    ]
    assert BUILD.arguments({"context_fmha": False, "gemm_plugin": "disable"}, "x") == [
        "--context_fmha=disable",
        "--gemm_plugin=disable",
    ]


def test_engines_of_the_torch_core_are_quantised_as_a_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {AllFields.model_path: "tiny-llama", AllFields.quantization: "int8", AllFields.dtype: "float32"}
    with Configuration(values, options={}, environ={}).autoapply():
        op = TorchBuilderOp()
        assert op.output.name == "tiny-llama-int8-torch-tp1-pp1"
        (command,) = op.commands(Path("engine"))
        assert torch_stage.main(command.argv[3:]) == 0
        built = json.loads(Path("engine/config.json").read_text())["pretrained_config"]
        assert (built["dtype"], built["quantization"]["quant_algo"]) == ("float32", "W8A16")
        assert op.digest() != TorchBuilderOp(quantization="auto").digest()
        with pytest.raises(
            ConfigError, match="--quantization int8, but --trtllm_checkpoint_flags: qformat fp8"
        ):
            TorchBuilderOp(TorchQuantizerOp(QuantizerConfig(flags={"qformat": "fp8"})))


def test_sizes_in_either_words() -> None:
    with pytest.raises(
        ConfigError, match="--trtllm_build_flags: tensor_parallelism 4, but --tensor_parallelism 2"
    ):
        TRTLLMLibraryLoader(tp_size=2, build_flags={"tensor_parallelism": 4})
    loader = TRTLLMLibraryLoader(
        checkpoint_flags={"tp_size": 4}, build_flags={"tensor_parallelism": 4, "pipeline_parallelism": 2}
    )
    assert (loader.layout.tp_size, loader.layout.pp_size, loader.layout.ranks) == (4, 2, 8)
