"""Which test NVIDIA's and MLCommons' names of a workload stand for: its form and its accuracy target."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from mpillm.options.command_line import Parser
from mpillm.options.fields import FIELDS
from mpillm.options.options import parse_run
from mpillm.stages.commands import run_harness as harness
from mpillm.stages.stage_options import parse_each
from tests.helpers.configured import DUMMY

NAMES = {
    "llama2-70b": ["llama2", "llama-v2", "llama-v2-70b", "llama2-70b-99", "LLAMA2-70B"],
    "llama2-70b-interactive": ["llama2-interactive", "llama-v2-70b-interactive", "llama2-70b-interactive-99"],
    "mixtral-8x7b": ["mixtral", "mixtral8x7b", "moe", "mixtral-8x7b-99"],
    "llama3.1-405b": ["llama3_1-405b", "llama-v3.1-405b", "llama3.1-405b-99", "llama3_1-405b-99"],
    "llama3.1-405b-interactive": ["llama3_1-405b-interactive", "llama-v3.1-405b-interactive-99"],
}


@pytest.mark.parametrize("workload", NAMES)
def test_every_name_that_nvidia_and_mlcommons_have_for_a_workload(workload: str) -> None:
    for name in [workload, *NAMES[workload]]:
        config = parse_run([*DUMMY, "--benchmarks", name])
        assert (config.benchmarks, config.accuracy_target) == ((workload,), 0.99), name
        assert config.workload and config.workload.name == workload
    high = parse_run([*DUMMY, f"--benchmarks={workload}-99.9"])
    assert (high.benchmarks, high.accuracy_target) == ((workload,), 0.999)
    assert high.to_json()["accuracy_target"] == {
        "value": 0.999,
        "source": f"command line: benchmarks {workload}-99.9",
    }


def test_a_name_with_an_accuracy_target_and_another_one() -> None:
    for name, target in (("llama2-70b-99", ".999"), ("llama2-70b-99.9", "0.99"), ("moe-99.9", "99")):
        with pytest.raises(ConfigError) as error:
            parse_run([*DUMMY, f"--benchmarks={name}", f"--accuracy_target={target}"])
        for word in (
            f"{name.removeprefix('moe').removeprefix('llama2-70b')} (command line) means"
            " accuracy_target 0.99",
            "but that is 0.99",
        ):
            assert word in str(error.value)
    assert parse_run([*DUMMY, "--benchmarks=llama2-99.9", "--accuracy_target=.999"]).accuracy_target == 0.999


def test_interactive_is_a_form_of_the_workload() -> None:
    for name in ("llama2-70b", "llama3.1-405b", "llama3.1-8b"):
        for benchmark in (name, f"{name}-interactive", f"{name}-99"):
            config = parse_run([*DUMMY, f"--benchmarks={benchmark}", "--scenarios=Interactive"])
            assert (config.benchmark, config.scenario) == (f"{name}-interactive", "Server")
            assert config.where("scenarios") == "command line: scenarios Interactive"
            assert config.workload is not None and config.workload.loadgen_model.endswith("-interactive")
    for argv, message in {
        "--benchmarks=moe": "scenarios Interactive (command line): mixtral-8x7b has no interactive form; it"
        " has Offline and Server",
        "": "scenarios Interactive (command line) is a form of a workload: name one with --benchmarks"
        " (llama2-70b, llama3.1-405b, llama3.1-8b, deepseek-r1, gpt-oss-120b)",
    }.items():
        with pytest.raises(ConfigError) as error:
            parse_run([*DUMMY, "--scenarios=interactive", *argv.split()])
        assert str(error.value) == message


def test_stages_of_interactive_forms_and_of_both_accuracy_targets() -> None:
    argv = [
        "--benchmarks=llama2-99,llama2-99.9",
        "--scenarios=Offline,Interactive",
        "--gpu_batch_size=llama2-70b:7",
    ]
    made = parse_each([*argv, "--core_type=dummy"], Parser(prog="mpillm x"), FIELDS)
    assert [(config.benchmark, config.scenario, config.accuracy_target) for config in made] == [
        ("llama2-70b", "Offline", 0.99),
        ("llama2-70b-interactive", "Server", 0.99),
        ("llama2-70b", "Offline", 0.999),
        ("llama2-70b-interactive", "Server", 0.999),
    ]
    assert {config.max_batch_size for config in made} == {7}, "the interactive form is the same model"


def test_the_tests_of_a_harness_keep_their_accuracy_target(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--benchmarks=llama2-99,llama2-99.9",
        "--scenarios=Offline,Interactive",
        *DUMMY,
        "--world_size=2",
        "--dry_run",
    ]
    assert harness.main([*argv, "--log_dir=runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" --scenarios=")[2] for line in lines] == [
        "Offline --benchmarks=llama2-70b-99 --log_dir=runs/llama2-70b-99-Offline",
        "Server --benchmarks=llama2-70b-interactive-99 --log_dir=runs/llama2-70b-interactive-99-Server",
        "Offline --benchmarks=llama2-70b-99.9 --log_dir=runs/llama2-70b-99.9-Offline",
        "Server --benchmarks=llama2-70b-interactive-99.9 --log_dir=runs/llama2-70b-interactive-99.9-Server",
    ]
