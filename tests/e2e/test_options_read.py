"""What ranks read of the options is what the options' declarations say, which `run` and `serve` go by."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mpillm.fields import FIELDS
from tests.helpers.support import ROOT, Starter
from tests.unit.config.test_idle import outcomes

# Notes the name of each option and the module that reads it, then does as `python -m mpillm`.
TRACER = """
import os, sys
from mpillm.config.values import Values

original, seen = Values.__getitem__, set()

def noting(self, field):
    frame = sys._getframe(1)
    frame = frame.f_back if frame.f_code.co_name == "__get__" else frame
    one = f"{field.name} {frame.f_globals['__name__']}"
    if one not in seen:
        seen.add(one)
        with open(os.environ["READ"], "a") as file:
            print(one, file=file)
    return original(self, field)

Values.__getitem__ = noting
from mpillm.cli import main

sys.exit(main())
"""
# They read values for rules and records, whatever comes of them; the last fills every core's record.
READ_ALL = ("mpillm.config.", "mpillm.configurator.", "mpillm.fields.")
OF_CORES = "mpillm.runtime.core_configs"
# What chooses the layout, the test or the core is read where the configuration is made.
READ_EARLY = {
    *("benchmarks", "scenarios", "accuracy_target", "model_scale", "dry_run", "log_dir", "disagg_config"),
    *("tensor_parallelism", "pipeline_parallelism", "moe_expert_parallelism", "control_ranks", "mode"),
    *("num_ctx_servers", "ctx_tp_size", "ctx_pp_size", "num_gen_servers", "gen_tp_size", "gen_pp_size"),
    *("trtllm_build_flags", "trtllm_checkpoint_flags", "trtllm_runtime_flags", "gpu_batch_size", "precision"),
}
# By `submission` and `compare`; by halves of servers; beside another client.
READ_LATER = {"system_name", "power_setting"}
READ_ELSEWHERE = {
    *("kv_secret", "kv_transfer_timeout_ms", "server_port", "worker_start_port"),
    *("harness_args", "harness_memory_limit", "concurrency"),
}
LOOKED_AT = {"core_type", "device", "server", "server_nodes", "enable_kv_cache_reuse"}  # is one there?
MADE = ["--dataset=synthetic", "--num_samples=20", "--min_duration=0"]
RUNS = {
    "run": [
        [*MADE, "--scenarios=Server", "--server_target_qps=50"],
        ["--mode=disaggregated", "--test_mode=AccuracyOnly"],
    ],
    "serve": [["--port=0", "--temperature=0.5", "--top_k=3", "--top_p=0.5", "--seed=3"]],
}


@pytest.mark.parametrize("command", RUNS)
def test_what_the_dummy_core_is_said_to_use_is_read(one: Starter, command: str) -> None:
    tracer, notes = one.folder / "tracer.py", one.folder / "read.txt"
    tracer.write_text(TRACER)
    for number, words in enumerate(RUNS[command]):
        log_dir = one.folder / f"run{number}"
        started = one.plain(
            3,
            *(one.python, tracer, command, "--core_type=dummy", f"--log_dir={log_dir}", *words),
            log_dir=log_dir,
            env={"READ": str(notes), "PYTHONPATH": str(ROOT)},
        )
        if command == "serve":
            started.wait_phase("ready")
            started.signal_group(signal.SIGINT)
        started.end()
    read: dict[str, set[str]] = {}
    for line in Path(notes).read_text().splitlines():
        name, module = line.split()
        if not module.startswith(READ_ALL):
            read.setdefault(name, set()).add(module)
    assert len(read) > 40
    wrong = {}
    for field in FIELDS:
        what = outcomes("dummy", field)[("run", "serve").index(command)]
        if what == "effect" and field.name not in read.keys() | READ_EARLY | READ_LATER | READ_ELSEWHERE:
            wrong[field.name] = "is said to have an effect, and nobody reads it"
        elif (
            what != "effect"
            and read.get(field.name, {OF_CORES}) != {OF_CORES}
            and field.name not in LOOKED_AT
        ):
            wrong[field.name] = f"is said to have none ({what}), and {read[field.name]} read it"
    assert wrong == {}
