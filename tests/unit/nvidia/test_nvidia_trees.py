"""NVIDIA's configuration files in trees of earlier rounds, and of the newest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm.nvidia.tree_files import in_tree
from tests.helpers.config_files import config_of


@pytest.mark.parametrize("there", ["code/x", "src/code/x", "src/x"])
def test_a_path_that_a_submission_has_moved(tmp_path: Path, there: str) -> None:
    """Its tree has `code`, or what was in it, below `src`."""
    folder = tmp_path / "configs" / "llama2-70b" / "Offline"
    folder.mkdir(parents=True)
    (answers := tmp_path / there / "generation_config.json").parent.mkdir(parents=True)
    answers.write_text("{}")
    (path := folder / "__init__.py").write_text("")
    assert in_tree("llm_gen_config_path", "code/x/generation_config.json", str(path)) == str(answers)
    assert in_tree("llm_gen_config_path", "code/y/other.json", str(path)) == "code/y/other.json"


def test_an_earlier_tree(tmp_path: Path) -> None:
    """A folder for each workload and scenario, classes for systems, flags of bases and of the class."""
    configs = tmp_path / "configs" / "llama2-70b"
    (configs / "Offline").mkdir(parents=True)
    (configs / "__init__.py").write_text(
        "import os, sys\nsys.path.insert(0, os.getcwd())\n"
        "from code.common.constants import Benchmark\n"
        "from configs.configuration import BenchmarkConfiguration\n"
        "class GPUBaseConfig(BenchmarkConfiguration):\n    benchmark = Benchmark.LLAMA2\n"
        "    workspace_size = 1 << 30\n    llm_gen_config_path = 'code/generation_config.json'\n"
        "    trtllm_build_flags = {'max_beam_width': 1, 'max_num_tokens': 512}\n"
    )
    (answers := tmp_path / "code" / "generation_config.json").parent.mkdir()
    answers.write_text('{"generation_config": {"max_output_len": 77}}')
    path = configs / "Offline" / "__init__.py"
    path.write_text(
        "from importlib import import_module\nfrom code.common.constants import Scenario\n"
        "from code.common.systems.system_list import KnownSystem\nfrom configs.configuration import *\n"
        "class Base(import_module('configs.llama2-70b').GPUBaseConfig):\n    scenario = Scenario.Offline\n"
        "@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99, PowerSetting.MaxP, 'TP2PP1')\n"
        "class One(Base):\n    system = KnownSystem.H200_SXM_141GBx8\n    offline_expected_qps = 16.0\n"
        "    trtllm_build_flags = {'max_num_tokens': 1536, 'tensor_parallelism': 2}\n"
        "@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99_9, PowerSetting.MaxP)\n"
        "class Two(One):\n    pass\n"
        "@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99_9, PowerSetting.MaxP, 'variant')\n"
        "class Three(One):\n    offline_expected_qps = 3.0\n"
        "@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99_9, PowerSetting.MaxP, 'other')\n"
        "class Four(One):\n    offline_expected_qps = 4.0\n"
        "@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99, PowerSetting.MaxP)\n"
        "class Other(Base):\n    system = KnownSystem.B200x8\n"
    )
    before = [*sys.path]
    words = ("--system_name", "H200_SXM_141GBx8", "--accuracy_target", "0.999")
    config = config_of(path, *words)
    assert (config.benchmarks, config.scenario, config.offline_expected_qps) == (
        ("llama2-70b",),
        "Offline",
        3,
    ), "NVIDIA's registry takes the first variant, also where there is a class without one"
    assert config.config_suffix == "variant"
    assert config_of(path, *words, "--config_suffix", "other").offline_expected_qps == 4
    with pytest.raises(ConfigError, match="no configuration for config_suffix PP2"):
        config_of(path, *words, "--config_suffix", "PP2")
    assert config.max_output_len == 77, "of its tree, wherever mpillm runs"
    flags = config.trtllm_build_flags
    assert (flags["max_num_tokens"], flags["max_beam_width"], config.tensor_parallelism) == (1536, 1, 2)
    assert config_of(path, "--system_name", "B200x8").trtllm_build_flags["max_num_tokens"] == 512
    with pytest.raises(ConfigError, match="several configurations fit"):
        config_of(path)
    assert sys.path == before and "configs.configuration" not in sys.modules


def test_a_tree_of_the_newest_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for each benchmark, system, backend and scenario; other packages, paths and a field more."""
    folder = tmp_path / "configs" / "llama3_1_8b" / "GB300x4" / "TRTLLM" / "Interactive"
    folder.mkdir(parents=True)
    answers = tmp_path / "src" / "benchmarks" / "generation_config.json"
    answers.parent.mkdir(parents=True)
    answers.write_text('{"generation_config": {"max_output_len": 77}}')
    head = (
        "import nv_mlpinf.common.constants as C\nimport nv_mlpinf.llmlib.fields as llm\n"
        "import nv_mlpinf.fields.harness as harness\nimport nv_mlpinf.common.paths as paths\nmine = {\n"
    )
    tail = "}\nEXPORTS = {C.WorkloadSetting(C.HarnessType.Custom, C.AccuracyTarget(0.99)): mine}\n"
    path = folder / "harness.py"
    path.write_text(
        head + "    llm.llm_gen_config_path: 'src/benchmarks/generation_config.json',\n"
        "    harness.tensor_path: paths.PREPROCESSED_DATA_DIR / 'llama3.1-8b',\n"
        "    harness.server_target_qps: 520,\n    harness.max_concurrency: 6144,\n"
        "    harness.workers_per_core: 8, llm.server_instance_size: 1,\n"
        "    llm.trtllm_runtime_flags: {'max_num_tokens': 8192},\n" + tail
    )
    monkeypatch.setenv("MLPERF_SCRATCH_PATH", "/scratch")
    config = config_of(path)
    assert (config.benchmarks, config.scenario) == (("llama3.1-8b-interactive",), "Server")
    assert (config.system_name, config.max_output_len) == ("GB300x4", 77)
    assert (config.dataset_path, config.server_target_qps) == ("/scratch/preprocessed_data/llama3.1-8b", 520)
    flags = config.trtllm_runtime_flags
    assert (flags["max_concurrency"], flags["max_num_tokens"]) == (6144, 8192)
    assert flags["workers_per_core"] == 8 and "server_instance_size 1" in config.passed_over()
    server = folder / "server.py"
    server.write_text(
        head + "    llm.trtllm_yml_override: paths.PROJECT_BASE_DIR / 'configs/a.yaml',\n" + tail
    )
    assert config_of(server).to_json()["trtllm_yml_override"]["value"] == str(tmp_path / "configs/a.yaml")
    whisper = tmp_path / "configs" / "whisper" / "GB300x4" / "TRTLLM" / "Offline" / "harness.py"
    whisper.parent.mkdir(parents=True)
    whisper.write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match="mpillm has no workload whisper"):
        config_of(whisper)
