"""Configurations of a person's own, in Python and in YAML: their values, and which of several is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm import user_config, workloads
from mpillm.nvidia.configs import TritonHarnessConfig
from mpillm.options.fields import general
from mpillm.options.mitten import configured
from mpillm.options.options import parse_run
from tests.helpers.config_files import REGISTERED, SEVERAL, config_of, written
from tests.helpers.skeleton import SKELETON

# What the skeleton needs above it: the import, and its base.
HEAD = """\
from mpillm.user_config import *

class HopperOfflineGPUBaseConfig(OfflineGPUBaseConfig):
    benchmark = Benchmark.LLAMA2

"""
IN_LLAMA2 = SKELETON.replace("model-name", "llama2-70b")
SAME_IN_YAML = """\
benchmark: llama2
scenario: Offline
harness_type: triton
accuracy_target: 0.99
power_setting: MaxP
system: YourSystemName
use_triton: true
triton-num-clients-per-frontend: 1
triton_num_frontends_per_model: 1
triton_num_servers: 1
gpu_batch_size: {llama2-70b: 2048}
offline_expected_qps: 25
trtllm_build_flags: {max_num_tokens: 1024, tensor_parallelism: 1, pipeline_parallelism: 2}
trtllm_runtime_flags: {max_num_tokens: 1024}
"""


@pytest.mark.parametrize(("name", "text"), [("mine.py", HEAD + IN_LLAMA2), ("mine.yaml", SAME_IN_YAML)])
def test_the_reference_skeleton(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, name, text)
    config = config_of(path)
    assert (config.benchmark, config.scenario, config.harness_type, config.accuracy_target) == (
        "llama2-70b",
        "Offline",
        "triton",
        0.99,
    )
    assert (config.system_name, config.offline_expected_qps, config.max_batch_size) == (
        "YourSystemName",
        25.0,
        2048,
    )
    assert (config.tensor_parallelism, config.pipeline_parallelism, config.max_num_tokens) == (1, 2, 1024)
    assert config.core_type == "triton_grpc"
    triton = configured(TritonHarnessConfig, config)
    assert triton.build_flags["max_num_tokens"] == triton.runtime_flags["max_num_tokens"] == 1024
    assert (triton.num_servers, triton.streaming) == (1, False)


def test_every_value_has_its_line(tmp_path: Path) -> None:
    python = written(tmp_path, "mine.py", HEAD + IN_LLAMA2)
    lines = (HEAD + IN_LLAMA2).splitlines()
    json = config_of(python, "--triton_num_servers", "4").to_json()
    at = {lines.index(line) + 1: line for line in lines}
    for name, text in (
        ("gpu_batch_size", "gpu_batch_size ="),
        ("system_name", "system ="),
        ("benchmarks", "benchmark ="),
    ):
        assert at[int(json[name]["source"].removeprefix(f"{python}:"))].strip().startswith(text)
    assert json["triton_num_servers"] == {"value": 4, "source": "command line"}
    assert json["trtllm_runtime_flags"]["source"]["max_num_tokens"].startswith(f"{python}:")
    assert json["trtllm_runtime_flags"]["source"]["use_inflight_batching"] == "default"
    assert json["trtllm_runtime_flags"]["source"]["enable_chunked_context"] == "workload llama2-70b"
    yaml = written(tmp_path, "mine.yaml", SAME_IN_YAML)
    assert config_of(yaml).where("offline_expected_qps") == f"{yaml}:12"


def test_values_of_every_kind_of_yaml(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "a.yml",
        "core_type: dummy\nseed: 7\ntop_p: 0.5\nsave_outputs: true\nstop_words: ['###', [13, 13]]\nscenarios:"
        " [offline, Server]\n"
        "triton_grpc_ports: {foo: [8001, 8002], bar: [8001, 8002]}\ntriton_server_urls: ['a:1',"
        " 'b:2']\ngpu_batch_size: 16\nlog_dir: ~\n",
    )
    config = config_of(path)
    assert (config.seed, config.top_p, config.save_outputs, config.scenarios) == (
        7,
        0.5,
        True,
        ("Offline", "Server"),
    )
    assert config.stop_words == ["###", [13, 13]]
    assert config.triton_grpc_ports == {"foo": (8001, 8002), "bar": (8001, 8002)}
    assert (config.triton_server_urls, config.max_batch_size, config.log_dir) == (("a:1", "b:2"), 16, None)


@pytest.mark.parametrize(
    ("options", "seed"),
    [
        ([], 2),
        (["--scenarios", "offline"], 2),
        (["--accuracy_target", ".999"], 3),
        (["--scenarios=Server"], 1),
        (["--scenarios=Server", "--power_setting=MaxQ"], 4),
        (["--system_name=H100x8"], 4),
        (["--seed", "9"], 9),
    ],
)
def test_which_of_several_is_meant(tmp_path: Path, options: list[str], seed: int) -> None:
    config = parse_run(["--config_file", str(written(tmp_path, "several.py", SEVERAL)), *options])
    assert config.seed == seed


FORMS = """\
- {benchmark: llama-v2-70b, scenario: Offline, seed: 1}
- {benchmark: llama2-70b-99.9, scenario: Offline, seed: 2}
- {benchmark: llama2-70b, scenario: Interactive, seed: 3}
- {benchmark: llama2-70b-interactive-99.9, seed: 4}
- {benchmark: llama2-70b, scenario: Server, accuracy_target: 0.99, seed: 5}
- {benchmark: llama2-70b, scenario: Server, accuracy_target: 0.999, seed: 6}
"""


@pytest.mark.parametrize(
    ("options", "seed", "test"),
    [
        ([], 1, ("llama2-70b", "Offline", 0.99)),
        (["--benchmarks=llama2-99.9"], 2, ("llama2-70b", "Offline", 0.999)),
        (["--accuracy_target=.999", "--scenarios=Offline"], 2, ("llama2-70b", "Offline", 0.999)),
        (["--scenarios=Interactive"], 3, ("llama2-70b-interactive", "Server", 0.99)),
        (["--benchmarks=llama2-70b-interactive"], 3, ("llama2-70b-interactive", "Server", 0.99)),
        (
            ["--benchmarks=llama2-70b-interactive-99", "--scenarios=Server"],
            3,
            ("llama2-70b-interactive", "Server", 0.99),
        ),
        (
            ["--benchmarks=llama2-70b", "--scenarios=Interactive", "--accuracy_target=0.999"],
            4,
            ("llama2-70b-interactive", "Server", 0.999),
        ),
        (["--scenarios=Server"], 5, ("llama2-70b", "Server", 0.99)),
        (["--benchmarks=llama2-70b-99.9", "--scenarios=Server"], 6, ("llama2-70b", "Server", 0.999)),
    ],
)
def test_interactive_forms_and_targets_in_names(
    tmp_path: Path, options: list[str], seed: int, test: tuple[Any, ...]
) -> None:
    """The same configuration and the same test are meant, however the file and the command line name them."""
    config = config_of(written(tmp_path, "forms.yaml", FORMS), *options)
    assert config.seed == seed
    assert (config.benchmark, config.scenario, config.accuracy_target) == test


@pytest.mark.parametrize(
    "options", [[], ["--benchmarks=llama2-70b"], ["--benchmarks=llama2", "--scenarios=Interactive"]]
)
def test_a_files_benchmark_holds_if_the_command_line_names_only_the_workload(
    tmp_path: Path, options: list[str]
) -> None:
    config = config_of(
        written(tmp_path, "a.yaml", "benchmark: llama2-70b-interactive-99.9\nseed: 4\n"), *options
    )
    assert (config.seed, config.benchmark, config.scenario, config.accuracy_target) == (
        4,
        "llama2-70b-interactive",
        "Server",
        0.999,
    )


def test_interactive_in_a_python_file(tmp_path: Path) -> None:
    text = (
        "from mpillm.user_config import *\n@ConfigRegistry.register(HarnessType.Custom,"
        " AccuracyTarget.k_99)\nclass A:\n"
        "    benchmark = Benchmark.LLAMA2\n    scenario = Scenario.Interactive\n    gpu_batch_size ="
        " {'llama2-70b': 768}\n"
    )
    config = config_of(written(tmp_path, "mine.py", text))
    assert (config.benchmark, config.scenario, config.max_batch_size) == (
        "llama2-70b-interactive",
        "Server",
        768,
    )
    path = written(tmp_path, "wrong.py", text.replace("LLAMA2", "Mixtral8x7B"))
    with pytest.raises(ConfigError) as error:
        config_of(path)
    assert str(error.value) == (
        f"scenarios Interactive ({path}:5): mixtral-8x7b has no interactive form; it has Offline and Server"
    )
    path = written(tmp_path, "both.py", text.replace("Benchmark.LLAMA2", "'llama2-70b-99.9'"))
    with pytest.raises(ConfigError) as error:
        config_of(path)
    assert (
        str(error.value)
        == f"{path}:4: benchmark llama2-70b-99.9 means accuracy_target 0.999, but {path}:3 has 0.99"
    )


def test_values_of_every_kind_of_python(tmp_path: Path) -> None:
    text = (
        f"from pathlib import Path\n{REGISTERED}    scenarios = [Scenario.Offline, Scenario.Server]\n   "
        " log_dir = Path('x')\n"
        "    end_ids = (2, 3)\n    dataset_path = None\n"
    )
    config = config_of(written(tmp_path, "mine.py", text))
    assert (config.scenarios, config.log_dir, config.end_ids, config.dataset_path) == (
        ("Offline", "Server"),
        "x",
        (2, 3),
        None,
    )


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("600000", 600), ("1200000.0", 1200), ("'2400000'", 2400), ("'600s'", 600), ("'10min'", 600), ("0", 0)],
)
def test_min_duration_counts_milliseconds_in_nvidias_form(
    tmp_path: Path, duration: str, seconds: float
) -> None:
    config = config_of(written(tmp_path, "mine.py", f"{REGISTERED}    min_duration = {duration}\n"))
    assert config.min_duration == seconds
    assert config_of(tmp_path / "mine.py", "--min_duration", "30").min_duration == 30, (
        "the command line counts seconds"
    )


def test_min_duration_counts_seconds_in_yaml(tmp_path: Path) -> None:
    assert config_of(written(tmp_path, "mine.yaml", "min_duration: 600\n")).min_duration == 600
    assert config_of(written(tmp_path, "mine.yaml", "min_duration: 600000ms\n")).min_duration == 600


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, "mpillm_test_neighbour.py", "class Shared:\n    seed = 5\n    core_type = 'dummy'\n")
    path = written(
        tmp_path,
        "mine.py",
        "from mpillm.user_config import *\nfrom mpillm_test_neighbour import Shared\n"
        "@ConfigRegistry.register(HarnessType.Custom)\nclass Mine(Shared):\n    top_k = 2\n",
    )
    config = config_of(path)
    assert (config.seed, config.where("seed")) == (5, f"{tmp_path / 'mpillm_test_neighbour.py'}:2")


@pytest.mark.parametrize(("name", "text"), [("a.py", f"{REGISTERED}    seed = 7\n"), ("a.yaml", "seed: 7\n")])
def test_a_file_written_on_windows(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    config = config_of(path)
    assert config.seed == 7 and config.where("seed").startswith(f"{path}:")


def test_use_triton_chooses_as_the_harness_type_does(tmp_path: Path) -> None:
    text = "- {core_type: triton_grpc, harness_type: triton, seed: 1}\n- {harness_type: custom, seed: 2}\n"
    path = written(tmp_path, "a.yaml", text)
    assert [
        config_of(path, *options).seed for options in (["--use_triton"], ["--harness_type=triton"], [])
    ] == [1, 1, 2]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return, by source, options that set --top_k (1 to 4) and --max_output_len there."""
    folder = tmp_path_factory.mktemp("sources")
    generation = folder / "generation_config.json"
    generation.write_text('{"generation_config": {"top_k": 2, "max_output_len": 22}}')
    python = f"{REGISTERED}    top_k = 3\n    max_output_len = 33\n"
    return {
        # says max_output_len 16, and nothing of top_k
        "workload": ["--benchmarks", "llama2", "--model_scale", "tiny"],
        "generation": ["--llm_gen_config_path", str(generation)],
        "python": ["--config_file", str(written(folder, "mine.py", python))],
        "yaml": ["--config_file", str(written(folder, "mine.yaml", "top_k: 3\nmax_output_len: 33\n"))],
        "command line": ["--top_k", "4", "--max-output-len=44"],
    }


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.sets(st.sampled_from(["workload", "generation", "file", "command line"])),
    kind=st.sampled_from(["python", "yaml"]),
)
@pytest.mark.long
def test_every_combination_of_sources(sources: dict[str, list[str]], chosen: set[str], kind: str) -> None:
    argv = [word for source in chosen for word in sources[kind if source == "file" else source]]
    config = parse_run(["--core_type", "dummy", *argv])
    top_k = {"command line": 4, "file": 3, "generation": 2}
    length = {"command line": 44, "file": 33, "generation": 22, "workload": 16}
    assert config.top_k == next((value for source, value in top_k.items() if source in chosen), 0)
    first = next((source for source in length if source in chosen), "default")
    assert config.max_output_len == length.get(first, 128)
    in_file = f"{sources[kind][1]}:{2 if kind == 'yaml' else 5}"
    where = {
        "file": in_file,
        "generation": sources["generation"][1],
        "workload": "workload llama2-70b (tiny)",
    }
    assert config.where("max_output_len") == where.get(first, first)
    assert config.is_user_set("max_output_len") == (first not in ("default", "workload"))


def test_the_names_that_a_file_imports_are_those_of_the_options() -> None:
    assert [member.value for member in user_config.Scenario] == [*general.SCENARIOS, general.INTERACTIVE]
    assert tuple(member.value for member in user_config.HarnessType) == general.HARNESS_TYPES
    assert tuple(member.value for member in user_config.PowerSetting) == general.POWER_SETTINGS
    assert [member.value for member in user_config.Benchmark] == list(workloads.WORKLOADS)


def test_what_a_file_prints_is_not_the_commands_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `plan --format json` prints stays JSON."""
    parse_run(
        [
            "--core_type",
            "dummy",
            "--config_file",
            str(written(tmp_path, "a.py", f"print('loaded')\n{REGISTERED}    seed = 1\n")),
        ]
    )
    assert capsys.readouterr() == ("", "loaded\n")
