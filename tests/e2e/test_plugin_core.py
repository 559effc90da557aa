"""A core is added in a test file and runs by name: adding a backend is one file and one registry line."""

from __future__ import annotations

from pathlib import Path

from support import DONE, ROOT, USAGE, Ended, Samples, Starter

HERE = str(Path(__file__).parent)

# Registers the core under a name of its own, then is `python -m mpillm`.
START = """
import sys
from mpillm.cli import main
from mpillm.cores import BackendRegistry
BackendRegistry.register("echo", "plugin_cores:Echo")
sys.exit(main(sys.argv[1:]))
"""
LAUNCH = """
import sys
from launch.mpirun import main
sys.exit(main(sys.argv[2:], program=[sys.executable, sys.argv[1]]))
"""


def check(ended: Ended, samples: Samples) -> None:
    ended.must(DONE)
    assert sorted(line["index"] for line in ended.outputs()) == list(range(len(samples.prompts)))
    for line in ended.outputs():
        assert line["output_tokens"] == samples.prompts[line["index"]][::-1][:4]


def test_a_core_by_module_and_class(both: Starter, samples: Samples) -> None:
    options = ["--dataset_path", samples.path, "--max_output_len", 4, "--save_outputs"]
    ended = both.run(5, *options, core="plugin_cores:Echo", env={"PYTHONPATH": f"{ROOT}:{HERE}"})
    check(ended, samples)
    assert ended.result["core_type"] == "plugin_cores:Echo"


def test_a_core_by_registered_name(one: Starter, samples: Samples, tmp_path: Path) -> None:
    start = tmp_path / "start.py"
    start.write_text(START)
    options = ["--dataset_path", samples.path, "--max_output_len", 4, "--save_outputs", "--log_dir", tmp_path / "run"]
    line = [one.python, "-c", LAUNCH, start, "-n", 3, "run", "--core_type", "echo", *options]
    check(one.command(line, env={"PYTHONPATH": f"{ROOT}:{HERE}"}).end(), samples)


def test_a_module_that_is_not_there(one: Starter) -> None:
    for core, word in (("no_such_module:Core", "no_such_module"), ("plugin_cores:Ecko", "Ecko"), ("support:Ended", "not an LLMCore")):
        ended = one.run(2, core=core, env={"PYTHONPATH": f"{ROOT}:{HERE}"}).must(USAGE)
        assert core in ended.message
        assert word in ended.message
