"""NVIDIA's configuration files: a tree of them in their form, what they import, what their values mean, and
what is wrong in them."""

from __future__ import annotations

import code
import sys
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm import user_config
from mpillm.core_names import BUILT_IN
from mpillm.cores.registry import check_core
from mpillm.options.command_line import Parser
from mpillm.options.fields import FIELDS, AllFields
from mpillm.options.options import parse, parse_run
from mpillm.options.run_config import RunConfig
from mpillm.options.unused_options import check_unused
from mpillm.trtllm.tool_options import BUILD

# The form of such a file; the values are ours.
HEAD = """\
import code.common.constants as C
import code.llmlib.fields as llm_fields
import code.fields.models as model_fields
import code.fields.loadgen as loadgen_fields
import code.fields.harness as harness_fields
from code.fields import power as power_fields
from code.fields.triton import use_triton

"""
LLAMA = (
    HEAD
    + """\
base = {
    model_fields.gpu_batch_size: {'llama2-70b': 96},
    model_fields.precision: 'fp8',
    model_fields.input_dtype: 'int32',
    llm_fields.llm_gen_config_path: 'code/llama2-70b/tensorrt/generation_config.json',
    loadgen_fields.min_duration: 1800000,
    loadgen_fields.offline_expected_qps: 12.5,
    harness_fields.tensor_path: 'build/preprocessed_data/mine/',
    llm_fields.trtllm_build_flags: {'max_num_tokens': 4096, 'gemm_plugin': 'fp4'},
    llm_fields.trtllm_checkpoint_flags: {'kv_cache_dtype': 'fp8'},
    llm_fields.trtllm_runtime_flags: {
        'max_num_tokens': 2048, 'max_batch_size': 48, 'enable_chunked_context': True
    },
    llm_fields.tensor_parallelism: 2,
    llm_fields.quantizer_outdir: 'build/checkpoints/mine',
    harness_fields.use_graphs: False,
    harness_fields.vboost_slider: 1,
}

EXPORTS = {
    C.WorkloadSetting(C.HarnessType.Custom, C.AccuracyTarget(0.99), C.PowerSetting.MaxP): base,
    C.WorkloadSetting(C.HarnessType.Triton, C.AccuracyTarget(0.999), C.PowerSetting.MaxP): {
        **base,
        use_triton: True,
        loadgen_fields.min_duration: 600000,
    },
    C.WorkloadSetting(power_setting=C.PowerSetting.MaxQ): {
        model_fields.precision: 'fp4',
        power_fields.power_limit: 450,
    },
}
"""
)
SERVER = """\
import copy
import importlib
import code.common.constants as C
import code.fields.loadgen as loadgen_fields
EXPORTS = copy.deepcopy(importlib.import_module("configs.My-System_x8.Offline.llama2-70b").EXPORTS)
only = C.WorkloadSetting(C.HarnessType.Custom, C.AccuracyTarget(0.99), C.PowerSetting.MaxP)
EXPORTS[only][loadgen_fields.server_target_qps] = 3
"""


def written(top: Path, place: str, text: str) -> Path:
    path = top / "configs" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Return the top of a tree that has nothing but configurations and a generation config."""
    generation = tmp_path / "tree" / "code/llama2-70b/tensorrt/generation_config.json"
    generation.parent.mkdir(parents=True)
    generation.write_text('{"generation_config": {"max_output_len": 77}}')
    written(tmp_path / "tree", "My-System_x8/Offline/llama2-70b.py", LLAMA)
    return tmp_path / "tree"


def config_of(path: Path, *options: str) -> RunConfig:
    return parse(["--config_file", str(path), *options], Parser(prog="mpillm x"), FIELDS)


def test_a_file_as_it_is(top: Path) -> None:
    """Values have our units and their lines; the path says the workload, the scenario and the system."""
    path = top / "configs/My-System_x8/Offline/llama2-70b.py"
    config = config_of(path)
    assert (config.benchmark, config.scenario, config.system_name) == (
        "llama2-70b",
        "Offline",
        "My-System_x8",
    )
    assert (config.harness_type, config.accuracy_target, config.power_setting) == ("custom", 0.99, "MaxP")
    assert (config.min_duration, config.offline_expected_qps, config.tensor_parallelism) == (1800.0, 12.5, 2)
    assert (config.dataset_path, config.llm_quantizer_outdir) == (
        "build/preprocessed_data/mine/",
        "build/checkpoints/mine",
    )
    assert (config.max_batch_size, config.max_num_tokens, config.enable_chunked_context) == (48, 2048, True)
    assert config.trtllm_build_flags == {
        "max_num_tokens": 4096,
        "gemm_plugin": "fp4",
        "max_batch_size": 96,
    }, "an engine is built for 96"
    assert (config.llm_gen_config_path, config.max_output_len) == (
        str(top / "code/llama2-70b/tensorrt/generation_config.json"),
        77,
    )
    lines = LLAMA.splitlines()
    for name, word in (
        ("precision", "'fp8'"),
        ("tensor_parallelism", "tensor_parallelism: 2"),
        ("vboost_slider", "vboost_slider: 1"),
    ):
        line = int(config.to_json()[name]["source"].removeprefix(f"{path}:"))
        assert word in lines[line - 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--accuracy_target=.999", "--harness_type=triton"], (600.0, "triton_grpc", "fp8")),
        (["--power_setting=MaxQ"], (None, "torch", "fp4")),
        (["--min_duration=30", "--benchmarks=llama2-70b-99"], (30.0, "torch", "fp8")),
    ],
)
def test_which_entry_is_meant(top: Path, options: list[str], expected: tuple[Any, ...]) -> None:
    config = config_of(top / "configs/My-System_x8/Offline/llama2-70b.py", *options)
    assert (config.min_duration, config.core_type, config.precision) == expected


def test_a_file_made_of_another_one_of_its_tree(top: Path) -> None:
    config = config_of(written(top, "My-System_x8/Server/llama2-70b.py", SERVER))
    assert (config.scenario, config.server_target_qps, config.min_duration) == ("Server", 3.0, 1800.0)
    assert config.where("server_target_qps").endswith("Server/llama2-70b.py"), (
        "no line: this is no dictionary of the file"
    )


def test_interactive_and_any_system(top: Path) -> None:
    config = config_of(written(top, "minimal/Interactive/llama2-70b.py", LLAMA), "--scenarios=Interactive")
    assert (config.benchmark, config.scenario, config.system_name) == (
        "llama2-70b-interactive",
        "Server",
        None,
    )
    assert config.trtllm_build_flags["max_batch_size"] == 96, "the interactive form is the same model"
    config = config_of(
        written(top, "minimal/Interactive/llama3_1-405b.py", LLAMA), "--gpu_batch_size=llama3_1-405b:7"
    )
    assert (config.benchmark, config.scenario) == ("llama3.1-405b-interactive", "Server")
    with pytest.raises(ConfigError, match="mixtral-8x7b has no interactive form; it has Offline and Server"):
        config_of(written(top, "minimal/Interactive/mixtral-8x7b.py", LLAMA))


def test_a_file_that_is_of_no_tree(tmp_path: Path) -> None:
    path = tmp_path / "llama2-70b.py"
    path.write_text(
        LLAMA.replace(
            "    llm_fields.llm_gen_config_path: 'code/llama2-70b/tensorrt/generation_config.json',\n", ""
        )
    )
    config = config_of(path, "--benchmarks=moe", "--scenarios=Server")
    assert (config.benchmark, config.scenario, config.min_duration, config.system_name) == (
        "mixtral-8x7b",
        "Server",
        1800.0,
        None,
    )


def test_values_for_kinds_of_tests_are_laid_over_the_others(tmp_path: Path) -> None:
    """As NVIDIA's main.py does: of the compliance test if there are any, else those of accuracy."""
    setting = "C.WorkloadSetting(C.HarnessType.Custom, C.AccuracyTarget(0.99), C.PowerSetting.MaxP)"
    path = written(
        tmp_path / "tree",
        "My-System_x8/Offline/gpt-oss-120b.py",
        HEAD
        + f"""\
EXPORTS = {{{setting}: {{
    loadgen_fields.min_query_count: 7,
    llm_fields.trtllm_build_flags: {{'max_input_len': 9, 'max_num_tokens': 8}},
}}}}
ACCURACY_OVERRIDES = {{{setting}: {{
    loadgen_fields.min_query_count: 70,
    llm_fields.trtllm_build_flags: {{'max_input_len': 90}},
}}}}
COMPLIANCE_OVERRIDES = {{C.AuditTest.TEST07: {{{setting}: {{loadgen_fields.min_query_count: 700}}}}}}
""",
    )
    for words, count, longest in (
        ([], 7, 9),
        (["--test_mode=AccuracyOnly"], 70, 90),
        (["--compliance_test=TEST07"], 700, 9),
        (["--compliance_test=TEST09"], 7, 9),
        (["--test_mode=AccuracyOnly", "--min_query_count=1"], 1, 90),
    ):
        config = config_of(path, *words)
        assert config.min_query_count == count
        assert config.trtllm_build_flags == {"max_input_len": longest, "max_num_tokens": 8}


def test_fields_of_later_rounds(tmp_path: Path) -> None:
    path = written(
        tmp_path / "tree",
        "My-System_x8/Interactive/llama3_1-405b.py",
        HEAD
        + """\
EXPORTS = {C.WorkloadSetting(): {
    loadgen_fields.max_query_count: 41,
    loadgen_fields.max_duration: 600000,
    llm_fields.readiness_timeout: 3600,
    llm_fields.traffic_distribution_policy: 'isl_load_balancing',
    llm_fields.warmup_iterations: 5,
    llm_fields.harness_use_hf_tokenizer: True,
    llm_fields.dynamo_cluster: {'prefill': {'nodes': 1}},
    harness_fields.enable_metrics: False,
    harness_fields.server_num_issue_query_threads: 8,
    harness_fields.numa_config: '0:0-3',
    llm_fields.trtllm_runtime_flags: {'sampler_type': 'x'},
}}
""",
    )
    config = config_of(path)
    assert (config.max_query_count, config.max_duration, config.load_deadline) == (41, 600.0, 3600.0)
    assert config.traffic_distribution_policy == "isl_load_balancing"
    assert config.passed_over() == (
        f"{path}: without effect here: server_num_issue_query_threads 8, numa_config 0:0-3,"
        " warmup_iterations 5, enable_metrics False,"
        " harness_use_hf_tokenizer True, dynamo_cluster {'prefill': {'nodes': 1}}"
    )
    assert [line for line in check_unused(config, "run") if "sampler_type" in line], "reported, not refused"


def test_nothing_of_it_stays(top: Path) -> None:
    """Python's own module `code` is back, and the next tree uses its own files of the same names."""
    before, paths = set(sys.modules), list(sys.path)
    written(top, "My-System_x8/Server/llama2-70b.py", SERVER)
    config_of(top / "configs/My-System_x8/Server/llama2-70b.py")
    assert sys.modules["code"] is code and sys.path == paths
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in ("code", "configs")}
    other = top.parent / "other"
    written(
        other,
        "My-System_x8/Offline/llama2-70b.py",
        HEAD + "EXPORTS = {C.WorkloadSetting(): {loadgen_fields.min_duration: 60000}}\n",
    )
    assert config_of(written(other, "My-System_x8/Server/llama2-70b.py", SERVER)).min_duration == 60.0


def test_an_error_about_a_path_names_the_file_that_set_it(top: Path) -> None:
    config = config_of(top / "configs/My-System_x8/Offline/llama2-70b.py")
    message = config.explain(
        ConfigError("data set build/preprocessed_data/mine does not exist", about=["dataset_path"])
    )
    assert message.splitlines()[1].startswith("dataset_path is set by") and message.endswith(
        "llama2-70b.py:16"
    )


def test_neighbours_of_the_same_name_in_two_folders(tmp_path: Path) -> None:
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "mpillm_test_shared.py").write_text(
            f"class Shared:\n    seed = {seed}\n    core_type = 'dummy'\n"
        )
        text = (
            "from mpillm.user_config import *\nfrom mpillm_test_shared import"
            " Shared\n@ConfigRegistry.register()\nclass A(Shared): ...\n"
        )
        (folder / "a.py").write_text(text)
        assert config_of(folder / "a.py").seed == seed


def test_options_without_effect_are_listed(top: Path) -> None:
    path = top / "configs/My-System_x8/Offline/llama2-70b.py"
    config = config_of(path)
    assert (
        config.passed_over()
        == f"{path}: without effect here: input_dtype int32, use_graphs False, vboost_slider 1"
    )
    assert config.to_json()["use_graphs"]["value"] is False
    assert parse_run(["--core_type=dummy"]).passed_over() == ""
    assert "vboost_slider" not in parse_run(["--core_type=dummy"]).to_json()
    yaml = top / "mine.yaml"
    yaml.write_text("core_type: dummy\npower_limit: 350\n")
    assert config_of(yaml).passed_over() == f"{yaml}: without effect here: power_limit 350"
    with pytest.raises(ConfigError, match="unknown option --vboost_slider"):
        parse_run(["--core_type=dummy", "--vboost_slider=1"])


FILE = "x/Offline/llama2-70b.py"


@pytest.mark.parametrize(
    ("place", "text", "words"),
    [
        ("x/Offline/gptj.py", LLAMA, ["gptj.py: mpillm has no workload gptj; it has llama2-70b, "]),
        ("x/Server/q-vl.py", "import code.q.harness\n", ["q-vl.py: mpillm has no workload q-vl; it has "]),
        (
            FILE,
            HEAD + "model_fields.precisoin\n",
            [":9: AttributeError: mpillm has no field precisoin", "'precision'?"],
        ),
        (FILE, HEAD + "C.PowerSetting.MaxX\n", [":9: AttributeError", "MaxX"]),
        (FILE, HEAD + "import code.ops\n", [":9: ModuleNotFoundError", "code.ops"]),
        (FILE, HEAD + "EXPORTS = []\n", [":9: EXPORTS: expected a dictionary of WorkloadSetting"]),
        (FILE, HEAD + "EXPORTS = {'a': {}}\n", [":9: EXPORTS: 'a': expected a WorkloadSetting"]),
        (
            FILE,
            HEAD + "EXPORTS = {C.WorkloadSetting(): {'seed': 1}}\n",
            [":9: EXPORTS: the key 'seed': expected a field"],
        ),
        (FILE, HEAD + "EXPORTS = {}\n", ["no configuration in it"]),
        (
            FILE,
            HEAD + "EXPORTS = {C.WorkloadSetting(): {\n    loadgen_fields.min_duration: 600}}\n",
            [":10: min_duration 600: a bare number in such a file is milliseconds; write '600s' or '600ms'"],
        ),
        (
            FILE,
            HEAD + "EXPORTS = {C.WorkloadSetting(): {llm_fields.tensor_parallelism: 0}}\n",
            [":9: tensor_parallelism 0: expected a whole number of at least 1"],
        ),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path: Path, place: str, text: str, words: list[str]) -> None:
    path = written(tmp_path, place, text)
    with pytest.raises(ConfigError) as error:
        config_of(path)
    assert str(path) in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_the_older_form_takes_nvidias_names_too(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "from mpillm.user_config import *\n@ConfigRegistry.register(HarnessType.Custom)\nclass A:\n   "
        " precision = 'fp8'\n"
        "    tensor_path = 'x'\n    use_token_latencies = True\n    core_type = CoreType.TRTLLM_EXECUTOR\n"
    )
    config = config_of(path)
    assert (config.precision, config.dataset_path, config.core_type) == ("fp8", "x", "trtllm_executor")
    assert [core.value for core in user_config.CoreType] == [*BUILT_IN]
    assert {harness.value for harness in user_config.HarnessType} == set(AllFields.harness_type.choices)


# --- precision: what it sets ---

EXECUTOR, TORCH = ["--core_type", "trtllm_executor"], ["--core_type", "torch", "--model_path", "tiny-llama"]


@pytest.mark.parametrize(
    ("precision", "qformat", "quantization"),
    [("fp8", "fp8", "fp8"), ("fp4", "nvfp4", "auto"), ("bf16", "full_prec", "none")],
)
def test_precision(precision: str, qformat: str, quantization: str) -> None:
    for argv, expected in ((EXECUTOR, "auto"), (TORCH, quantization)):
        config = parse(
            [*argv, "--precision", precision, "--trtllm_checkpoint_flags=kv_cache_dtype:fp8"],
            Parser(prog="x"),
            FIELDS,
        )
        assert config.trtllm_checkpoint_flags == {"kv_cache_dtype": "fp8", "qformat": qformat}
        assert config.to_json()["trtllm_checkpoint_flags"]["source"]["qformat"] == "command line: precision"
        assert config.quantization == expected


def test_precision_and_equivalent_options(tmp_path: Path) -> None:
    """The higher source holds; two values of one source must agree."""
    path = tmp_path / "a.yaml"
    path.write_text("precision: fp8\n")
    argv = [*TORCH, "--config_file", str(path)]
    config = parse_run([*argv, "--trtllm_checkpoint_flags=qformat:int8_wo", "--quantization=int8"])
    assert (config.trtllm_checkpoint_flags, config.quantization) == ({"qformat": "int8_wo"}, "int8")
    path.write_text("trtllm_checkpoint_flags: {qformat: int8_wo}\nquantization: int8\n")
    config = parse_run([*argv, "--precision=fp8"])
    assert (config.trtllm_checkpoint_flags, config.quantization) == ({"qformat": "fp8"}, "fp8")
    assert parse_run(
        [*TORCH, "--precision=fp8", "--trtllm_checkpoint_flags=qformat:fp8", "--quantization=fp8"]
    )
    for other, words in {
        "--trtllm_checkpoint_flags=qformat:int8_wo": "means qformat fp8 among trtllm_checkpoint_flags, but"
        " that is int8_wo (command line)",
        "--quantization=none": "means quantization fp8, but that is none (command line)",
    }.items():
        with pytest.raises(ConfigError) as error:
            parse_run([*TORCH, "--precision=fp8", other])
        assert str(error.value) == f"precision fp8 (command line) {words}"


def test_the_torch_core_refuses_a_precision_that_it_does_not_have(top: Path) -> None:
    argv = ["--config_file", str(top / "configs/My-System_x8/Offline/llama2-70b.py"), "--power_setting=MaxQ"]
    with pytest.raises(
        ConfigError,
        match=r"precision fp4 \(.*.py:\d+\): the torch core has no such weights; choose them with"
        r" --quantization",
    ):
        check_core(parse_run(argv))
    check_core(parse_run([*argv, "--quantization=fp8"]))


def test_fp4_is_nvfp4_to_the_tools() -> None:
    assert BUILD.arguments({"gemm_plugin": "fp4"}, "x") == ["--gemm_plugin=nvfp4"]
    with pytest.raises(ConfigError, match="moe_plugin fp4: not one of auto"):
        BUILD.arguments({"moe_plugin": "fp4"}, "x")


@pytest.mark.parametrize(
    ("options", "run", "engine"),
    [
        (["--gpu_batch_size=96"], 96, None),
        (["--gpu_batch_size=96", "--trtllm_runtime_flags=max_batch_size:48"], 48, 96),
        (["--gpu_batch_size=96", "--trtllm_runtime_flags=max_batch_size:128"], 128, None),
        (
            [
                "--gpu_batch_size=96",
                "--trtllm_runtime_flags=max_batch_size:48",
                "--trtllm_build_flags=max_batch_size:64",
            ],
            48,
            64,
        ),
    ],
)
def test_the_batch_that_an_engine_is_built_for(options: list[str], run: int, engine: int | None) -> None:
    config = parse([*EXECUTOR, *options], Parser(prog="x"), FIELDS)
    assert (config.max_batch_size, config.trtllm_build_flags.get("max_batch_size")) == (run, engine)
