"""Cores and harnesses in the words of NVIDIA's llmlib run alone, and on ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.support import DONE, ROOT, TEST_FAILED, USAGE, Ended, Samples, Starter

EXAMPLE = ROOT / "examples/llmlib_harness.py"
SERVER = ("--scenarios=Server", "--server_target_qps=50", "--min_duration=0", "--min_query_count=30")


def options(place: Path, samples: Samples, *more: object) -> list[object]:
    return [
        f"--dataset_path={samples.path}",
        "--max_output_len=4",
        "--save_outputs",
        f"--log_dir={place / 'run'}",
        *more,
    ]


def check(ended: Ended, samples: Samples, scenario: str) -> None:
    ended.must(DONE)
    assert ended.outputs()
    for line in ended.outputs():
        assert line["output_tokens"] == samples.prompts[line["index"]][::-1][:4]
    assert ended.result["scenario"] == scenario and ended.result["errors"] == 0
    if scenario == "Offline":
        assert sorted(line["index"] for line in ended.outputs()) == list(range(len(samples.prompts)))


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_the_example_alone(one: Starter, samples: Samples, scenario: str) -> None:
    more = SERVER if scenario == "Server" else ()
    check(one.command([one.python, EXAMPLE, *options(one.folder, samples, *more)]).end(), samples, scenario)


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_the_example_on_ranks(both: Starter, samples: Samples, scenario: str) -> None:
    more = SERVER if scenario == "Server" else ()
    ended = both.plain(3, both.python, EXAMPLE, *options(both.folder, samples, *more)).end()
    check(ended, samples, scenario)
    assert [instance["samples"] > 0 for instance in ended.result["per_instance"]] == [True, True]


def test_the_core_in_a_run(one: Starter, samples: Samples) -> None:
    """Its class names it, as any core's does; its arguments are --core_options."""
    env = {"PYTHONPATH": f"{EXAMPLE.parent}:{ROOT}"}
    words = [f"--dataset_path={samples.path}", "--max_output_len=4", "--save_outputs"]
    check(
        one.run(3, *words, "--core_options=n_cores:2", core="llmlib_harness:EchoCore", env=env),
        samples,
        "Offline",
    )
    ended = one.run(3, *words, core="llmlib_harness:EchoCore", env=env)
    assert (
        "EchoCore.get_num_cores_for_workload() gave 1, but this run has 2 instances"
        in ended.must(USAGE).message
    )


def test_serve_refuses_a_core_whose_requests_have_no_lengths(one: Starter) -> None:
    env = {"PYTHONPATH": f"{EXAMPLE.parent}:{ROOT}"}
    words = ("--core_type=llmlib_harness:EchoCore", f"--log_dir={one.folder / 'run'}", "--port=0")
    ended = one.plain(2, one.python, "-m", "mpillm", "serve", *words, env=env).end()
    message = ended.must(USAGE).message
    assert "--core_type llmlib_harness:EchoCore: serve does not support cores of llmlib" in message


FAILING = """
import threading
from llmlib_harness import EchoCore

class Failing(EchoCore):
    def _poll_responses_impl(self, timeout):
        in_thread = threading.current_thread() is not threading.main_thread()
        if not self.in_warmup_mode and in_thread and self.processed_count > 5:
            raise ValueError("the backend is gone")
        yield from super()._poll_responses_impl(timeout)
"""


def test_a_core_that_fails_ends_the_run(one: Starter, samples: Samples) -> None:
    (one.folder / "failing.py").write_text(FAILING)
    env = {"PYTHONPATH": f"{one.folder}:{EXAMPLE.parent}:{ROOT}"}
    ended = one.run(
        2, f"--dataset_path={samples.path}", "--max_output_len=4", core="failing:Failing", env=env
    )
    assert "core EchoCore#0 failed: ValueError: the backend is gone" in ended.must(TEST_FAILED).message


HARNESS = """
import json, sys
from mpillm.configurator import Configuration
from mpillm.llmlib import LLMDataLoader, LLMHarnessOp, fields
from llmlib_harness import EchoCore

class Loader(LLMDataLoader):
    def __init__(self, **kwargs):
        super().__init__(["ids.npy", "lens.npy"], **kwargs)
    def __len__(self):
        return len(self.lens)
    def get_input_tokens(self, sample_indices):
        return [self.ids[i, : self.lens[i]].tolist() for i in sample_indices]

class Harness(LLMHarnessOp):
    data_loader = Loader

with Configuration({fields.max_output_len: 3, fields.dataset_path: sys.argv.pop()}).autoapply():
    done = Harness(core_type=EchoCore, save_outputs=True).run()
if done["result_metadata"]:
    print(json.dumps({"log_dir": done["log_dir"], "samples": done["result_metadata"]["samples"]}))
"""


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_harness_with_a_loader_of_its_own(one: Starter, ranks: int) -> None:
    import numpy as np

    np.save(one.folder / "ids.npy", np.arange(1, 41, dtype=np.int32).reshape(8, 5))
    np.save(one.folder / "lens.npy", np.array([5, 4, 3, 5, 4, 3, 5, 5]))
    (one.folder / "harness.py").write_text(HARNESS)
    env = {"PYTHONPATH": f"{EXAMPLE.parent}:{ROOT}"}
    words = [one.python, "harness.py", f"--log_dir={one.folder / 'run'}", one.folder]
    ended = (one.plain(ranks, *words, env=env) if ranks else one.command(words, env=env)).end().must(DONE)
    assert {line["index"]: line["output_tokens"] for line in ended.outputs()}[1] == [9, 8, 7]
    assert json.loads(ended.out.splitlines()[-1]) == {
        "log_dir": str(one.folder / "run"),
        "samples": ended.result["samples"],
    }
