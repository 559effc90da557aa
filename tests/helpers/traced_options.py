"""Who reads which option in real runs: a tracer for the ranks, and what it is held against."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from mpillm.options.fields import BY_NAME, FIELDS
from tests.helpers.every_option import outcomes
from tests.helpers.support import ROOT, Command, Starter, wait_until

# Notes the option, the module and the function that reads it from the values of the run, of an engine or of a
# harness, then does as `python -m mpillm`.
TRACER = """
import os, sys
from mpillm.nvidia.backends import HarnessConfig
from mpillm.engine.shape.engine_config import EngineConfig, SchedulerConfig
from mpillm.options.values import Values
from mpillm.configurator import bound_fields

seen, of_harness = set(), {}

def note(name, frame):
    one = f"{name} {frame.f_globals['__name__']} {frame.f_code.co_name}"
    if one not in seen:
        seen.add(one)
        with open(os.environ["READ"], "a") as file:
            print(one, file=file)

original = Values.__getitem__

def of_the_run(self, field):
    frame = sys._getframe(1)
    note(field.name, frame.f_back if frame.f_code.co_name == "__get__" else frame)
    return original(self, field)

def of_an_engine(self, name):
    if not name.startswith("_"):
        note({"n_threads": "num_threads"}.get(name, name), sys._getframe(1))
    return object.__getattribute__(self, name)

def of_a_harness(self, name):
    cls = object.__getattribute__(self, "__class__")
    if cls not in of_harness:
        of_harness[cls] = {argument: field.name for field, argument in bound_fields(cls).items()}
    if name in of_harness[cls]:
        note(of_harness[cls][name], sys._getframe(1))
    return object.__getattribute__(self, name)

Values.__getitem__ = of_the_run
EngineConfig.__getattribute__ = SchedulerConfig.__getattribute__ = of_an_engine
HarnessConfig.__getattribute__ = of_a_harness
from mpillm.cli import main

sys.exit(main())
"""
# They read values for rules and records, whatever comes of them.
READ_ALL = (
    *("mpillm.options.", "mpillm.nvidia.backends", "mpillm.configurator.", "mpillm.fields."),
    *("dataclasses", "copy"),
)
RECORDS = {  # a comprehension is a function of its own up to Python 3.11
    *(
        ("mpillm.runtime.core_configs", name) for name in ("_core_config", "check_flags", "<dictcomp>")
    ),  # every core's record, and its flags' limits
    *(("mpillm.runtime.core_configs", name) for name in ("in_force", "<dictcomp>")),  # the YAML of what ran
}
CHECKS = ("__post_init__", "_fit")  # of configurations
# What chooses the layout, the test or the core is read where the configuration is made.
READ_EARLY = {
    *("benchmarks", "scenarios", "accuracy_target", "model_scale", "dry_run", "log_dir", "disagg_config"),
    *("tensor_parallelism", "pipeline_parallelism", "moe_expert_parallelism", "control_ranks", "mode"),
    *("num_ctx_servers", "ctx_tp_size", "ctx_pp_size", "num_gen_servers", "gen_tp_size", "gen_pp_size"),
    *("trtllm_build_flags", "trtllm_checkpoint_flags", "trtllm_runtime_flags", "gpu_batch_size", "precision"),
    *("max_batch_size", "llm_gen_config_path", "harness_type", "use_triton", "compliance_test"),
    "triton_grpc_ports",
}
# By `submission` and `compare`; by halves of servers; beside another client or a server of the run's own.
READ_ELSEWHERE = {
    *("system_name", "power_setting", "kv_secret", "kv_transfer_timeout_ms", "server_port"),
    *("worker_start_port", "harness_args", "harness_memory_limit", "concurrency", "server_args"),
    *("server_memory_limit", "clients_per_server", "tritonserver", "triton_model_repo"),
    *("triton_num_frontends_per_model", "triton_skip_server_spawn", "context_chunking_policy"),
    *("shuffle", "max_input_len", "trace_columns"),  # with a file of conversations
}
LOOKED_AT = {  # is one there? May it be? What is said of it?
    *("core_type", "device", "server", "server_nodes", "enable_kv_cache_reuse", "speculative_config"),
    *("enable_max_num_tokens_tuning", "engine_dir", "compliance_test"),
    *("harness", "endpoint_type", "lora_modules", "acceptance_length", "max_local_prefill_length"),
    *("cache_salt", "reset_prefix_cache", "profile", "requests_file"),
}
SERVER = (
    *("--dataset=synthetic", "--num_samples=20", "--min_duration=0", "--max_output_len=4"),
    *("--scenarios=Server", "--server_target_qps=50", "--min_query_count=20"),
)
PROMPTS = ("--max_output_len=2",)
CONVERSATIONS = (
    *(
        "--harness=conversations",
        "--num_conversations=4",
        "--synthetic_conversations=turns=2,input=9,output=4",
    ),
    *("--max_output_len=4", "--scenarios=Server", "--server_target_qps=50"),
)
SERVING = ("--port=0", "--temperature=0.5", "--top_k=3", "--top_p=0.5", "--seed=3")
OF_A_CLIENT: Mapping[str, Sequence[Sequence[str]]] = {
    "run": [SERVER, PROMPTS, CONVERSATIONS],
    "serve": [SERVING],
}


def serves(command: Command) -> bool:
    return "serving " in command.out or command.process.poll() is not None


def read_by(
    one: Starter, command: str, of_core: Sequence[str], runs: Mapping[str, Sequence[Sequence[str]]]
) -> dict[str, set[str]]:
    """Return the modules that read each option in `runs` of a command, by command, each with more words."""
    tracer, notes = one.folder / "tracer.py", one.folder / "read.txt"
    tracer.write_text(TRACER)
    for number, words in enumerate(runs[command]):
        log_dir = one.folder / f"{command}{number}"
        started = one.plain(
            3,
            *(one.python, tracer, command, f"--log_dir={log_dir}", *of_core, *words),
            log_dir=log_dir,
            env={"READ": str(notes), "PYTHONPATH": str(ROOT)},
        )
        if command == "serve":
            # Before that a signal may end it without a page, which reads options, too.
            wait_until(partial(serves, started), "serving", 120)
            # Not mpirun, which forwards it: the second one ends a rank that has not written its page yet.
            os.kill(json.loads((log_dir / "ranks.json").read_text())[0]["pid"], signal.SIGINT)
        ended = started.end(120)
        assert command == "serve" or ended.code == 0, f"{ended!r}"
    read: dict[str, set[str]] = {}
    for line in notes.read_text().splitlines():
        name, module, function = line.split()
        is_check = module == "mpillm.nvidia.configs" and function in CHECKS
        is_record = (module, function) in RECORDS or is_check
        if name in BY_NAME and not module.startswith(READ_ALL) and not is_record:
            read.setdefault(name, set()).add(module)
    return read


def lies(
    core: str, command: str, read: Mapping[str, set[str]], elsewhere: Iterable[str] = ()
) -> dict[str, str]:
    """Return what is wrong with declarations of options, by option; `elsewhere`: read where no test looks."""
    wrong = {}
    for field in FIELDS:
        what = outcomes(core, field)[("run", "serve").index(command)]
        if what == "effect" and field.name not in {*read, *READ_EARLY, *READ_ELSEWHERE, *elsewhere}:
            wrong[field.name] = "is said to have an effect, and nobody reads it"
        elif what != "effect" and read.get(field.name) and field.name not in LOOKED_AT:
            wrong[field.name] = f"is said to have none ({what}), and {read[field.name]} read it"
    return wrong
