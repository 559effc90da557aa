"""What is wrong in a configuration file is named with its file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.options.options import parse_run
from tests.helpers.config_files import REGISTERED, SEVERAL, config_of, written


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        # Names
        (
            "a.py",
            f"{REGISTERED}    top_k = 1\n    tok_p = 1\n",
            [],
            ["a.py:5: there is no option tok_p", "did you mean 'top_p'?"],
        ),
        (
            "a.yaml",
            "top_k: 1\ntok_p: 1\n",
            [],
            ["a.yaml:2: there is no option tok_p", "did you mean 'top_p'?"],
        ),
        (
            "a.yaml",
            "config_file: b.yaml\n",
            [],
            ["a.yaml:1: config_file can be given only on the command line"],
        ),
        (
            "a.py",
            f"{REGISTERED}    scenrio = Scenario.Server\n",
            [],
            ["a.py:4", "scenrio", "did you mean 'scenario'?"],
        ),
        # Values
        (
            "a.py",
            f"{REGISTERED}    seed = -1\n",
            [],
            ["a.py:4: seed -1: expected a whole number of at least 0"],
        ),
        ("a.py", f"{REGISTERED}    seed = 1.5\n", [], ["a.py:4: seed 1.5: expected a whole number"]),
        (
            "a.py",
            f"{REGISTERED}    max_batch_size = True\n",
            [],
            ["a.py:4: max_batch_size true: expected a whole number"],
        ),
        ("a.yaml", "top_p: 2\n", [], ["a.yaml:1: top_p 2: expected a number above 0 and up to 1"]),
        ("a.yaml", "scenario: Multi\n", [], ["a.yaml:1: scenario Multi: expected one or several of Offline"]),
        (
            "a.yaml",
            "mode: aggregate\n",
            [],
            ["a.yaml:1: mode aggregate: not one of", "did you mean 'aggregated'?"],
        ),
        (
            "a.yaml",
            "trtllm_runtime_flags: max\n",
            [],
            ["a.yaml:1: trtllm_runtime_flags max: expected key:value", "'max' is not key:value"],
        ),
        (
            "a.yaml",
            "trtllm_runtime_flags: [1]\n",
            [],
            ["a.yaml:1: trtllm_runtime_flags [1]: expected key:value"],
        ),
        (
            "a.yaml",
            "triton_grpc_ports: {a: [0]}\n",
            [],
            ["a.yaml:1: triton_grpc_ports a:0: expected host_0", "'0' is not a port"],
        ),
        (
            "a.yaml",
            "gpu_batch_size: {llama: 1}\n",
            [],
            ["a.yaml:1: gpu_batch_size llama", "there is no llama (did you mean 'llama2'?)"],
        ),
        (
            "a.py",
            f"{REGISTERED}    min_duration = 600\n",
            [],
            ["a.py:4: min_duration 600:", "is milliseconds; write '600s' or '600ms'"],
        ),
        (
            "a.py",
            f"{REGISTERED}    min_duration = 600000000\n",
            [],
            ["a.py:4: min_duration 600000000ms: expected", "are 6.94 days"],
        ),
        (
            "a.yaml",
            "min_duration: 600000\n",
            [],
            ["a.yaml:1: min_duration 600000: expected", "are 6.94 days", "write 600000ms"],
        ),
        (
            "a.py",
            f"{REGISTERED}    min_duration = '1d'\n",
            [],
            ["a.py:4: min_duration 1d: expected a duration"],
        ),
        # Values of another kind
        ("a.yaml", "top_k: 1\nseed: ~\n", [], ["a.yaml:2: seed null: leave it out for its default, 0"]),
        ("a.yaml", "scenarios:\n", [], ["a.yaml:1: scenarios null: leave it out for its default, Offline"]),
        ("a.yaml", "log_dir: [a, b]\n", [], ["a.yaml:1: log_dir ['a', 'b']: expected a text"]),
        ("a.yaml", "model_path: no\n", [], ["a.yaml:1: model_path false: expected a text; put it in quotes"]),
        ("a.yaml", "model_path: ' '\n", [], ["a.yaml:1: model_path ' ': expected a text that is not empty"]),
        ("a.yaml", "stop_words: {a: 1}\n", [], ["a.yaml:1: stop_words", "expected a word, or a JSON array"]),
        ("a.yaml", "stop_words: 5\n", [], ["a.yaml:1: stop_words", "expected a word, or a JSON array"]),
        (
            "a.yaml",
            "core_options: {1: 2}\n",
            [],
            ["a.yaml:1: core_options: the key 1 (an integer); must be a string"],
        ),
        (
            "a.yaml",
            "core_options: {a: 2020-01-01}\n",
            [],
            ["a.yaml:1: core_options: a: datetime.date(2020, 1, 1)", "must be null, true"],
        ),
        ("a.yaml", "core_options: {a: .nan}\n", [], ["a.yaml:1: core_options: a: nan", "a finite number"]),
        ("a.yaml", "core_options: &a {b: *a}\n", [], ["a.yaml:1: core_options: nested too deeply"]),
        (
            "a.py",
            f"{REGISTERED}    core_options = {{'a': object()}}\n",
            [],
            ["a.py:4: core_options: a: <object", "must be null, true"],
        ),
        ("a.py", f"{REGISTERED}    seed = 10**5000\n", [], ["a.py:4: seed: Exceeds the limit"]),
        ("a.yaml", "stop_words: &a [*a]\n", [], ["a.yaml:1: stop_words: Circular reference"]),
        (
            "a.yaml",
            "llm_gen_config_path: none.json\n",
            [],
            ["none.json: no such file (--llm_gen_config_path, ", "a.yaml:1)"],
        ),
        (
            "a.py",
            f"{REGISTERED}    max_output_len = None\n",
            [],
            ["a.py:4: max_output_len null: leave it out for its default, 128"],
        ),
        # Flags
        (
            "a.yaml",
            "trtllm_runtime_flags: {max_num_tokens: 0}\n",
            [],
            ["a.yaml:1: trtllm_runtime_flags max_num_tokens 0: expected a whole"],
        ),
        (
            "a.yaml",
            "trtllm_build_flags: {tensor_parallelism: x}\n",
            [],
            ["a.yaml:1: trtllm_build_flags tensor_parallelism x: expected"],
        ),
        # Files
        ("a.txt", "", [], ["must be a file .py, .yaml or .yml"]),
        ("a.py", "x = 1\0\n", [], ["a.py:1: ", "null bytes"]),
        ("a.yaml", "[]\n", [], ["no configuration in it"]),
        ("a.py", "x = )", [], ["a.py:1: ", "unmatched ')'"]),
        ("a.py", "x = 1\n\ny = x / 0\n", [], ["a.py:3: ZeroDivisionError: division by zero"]),
        ("a.py", "import sys\nsys.exit('no')\n", [], ["a.py:2: SystemExit: no"]),
        ("a.py", "from mpillm.user_config import Nothing\n", [], ["a.py:1: ImportError", "Nothing"]),
        (
            "a.py",
            "from mpillm.user_config import *\nAccuracyTarget.k_98\n",
            [],
            ["a.py:2: AttributeError", "k_98"],
        ),
        (
            "a.py",
            "from mpillm.user_config import *\nConfigRegistry.register('Triton')\n",
            [],
            ["a.py:2: TypeError: register('Triton')"],
        ),
        ("a.py", "class A: seed = 1\n", [], ["no configuration in it", "@ConfigRegistry.register"]),
        (
            "a.py",
            f"{REGISTERED}    def seed(self): ...\n",
            [],
            ["a.py", "seed: a configuration has values, no methods"],
        ),
        (
            "a.py",
            f"{REGISTERED}    harness_type = 'custom'\n",
            [],
            ["a.py:4: harness_type is set here, and by ConfigRegistry.register"],
        ),
        ("a.yaml", "seed: [\n", [], ["a.yaml:2: not valid YAML"]),
        ("a.yaml", "seed: 1\nseed: 2\n", [], ["a.yaml:2: not valid YAML: duplicate key 'seed'"]),
        ("a.yaml", "core_options: {a: 1, a: 2}\n", [], ["a.yaml:1: not valid YAML: duplicate key 'a'"]),
        ("a.yaml", "seed: !!int ''\n", [], ["a.yaml: not valid YAML"]),
        (
            "a.yaml",
            "scenario: Server\nscenarios: Offline\n",
            [],
            ["a.yaml:2: scenarios is Offline, but ", "but Server in"],
        ),
        ("a.yaml", "- seed\n", [], ["a.yaml:1: must be a mapping of options"]),
        ("a.yaml", "", [], ["a.yaml:1: must be a mapping of options"]),
        # Which one
        (
            "a.py",
            SEVERAL,
            ["--scenarios", "SingleStream"],
            ["no configuration for scenarios SingleStream; there are: Offline (", "a.py:8"],
        ),
        (
            "a.yaml",
            "- {name: x, seed: 1}\n- {name: y, seed: 2}\n",
            [],
            ["several configurations fit: x (", "a.yaml:2", "keep one of them"],
        ),
        (
            "a.yaml",
            "- {system: a}\n- {system: b}\n",
            [],
            ["several configurations fit", "choose by --system_name"],
        ),
    ],
)
def test_what_is_wrong_in_a_file(
    tmp_path: Path, name: str, text: str, options: list[str], words: list[str]
) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as error:
        config_of(path, *options)
    for word in words:
        assert word in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["none.py", "none.yaml"])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--config_file {tmp_path / name}: cannot be read: No such file"):
        config_of(tmp_path / name)


def test_values_that_do_not_go_together_name_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "core_type: dummy\nmin_output_len: 9\n")
    with pytest.raises(ConfigError) as error:
        parse_run(["--config_file", str(path), "--max_output_len", "3"])
    assert f"min_output_len 9 ({path}:2) is more than --max_output_len 3" in str(error.value)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            "use_triton: true\n",
            ["--core_type", "torch"],
            ["means core_type triton_grpc, but that is torch (command line)"],
        ),
        (
            "use_triton: true\nharness_type: custom\n",
            [],
            ["use_triton True", "means harness_type triton, but that is custom", "a.yaml:2"],
        ),
        (
            "core_type: trtllm_disagg\n",
            ["--mode", "aggregated"],
            ["means mode disaggregated, but that is aggregated (command line)"],
        ),
    ],
)
def test_options_that_imply_others(tmp_path: Path, text: str, options: list[str], words: list[Any]) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(written(tmp_path, "a.yaml", text), *options)
    assert all(word in str(error.value) for word in words)
