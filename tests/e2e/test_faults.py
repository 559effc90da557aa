"""Bad input and faults: an exit code, one message that names the cause and the rank, an end in time, and
nothing left behind.

(`Command.end` asserts the last two for every test: no process is left, and it fails when its own limit
passes.)
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    ROOT,
    TEST_FAILED,
    USAGE,
    Command,
    Ended,
    Samples,
    Starter,
    make_samples,
    wait_until,
)

HERE = Path(__file__).parent
START_S = 45.0  # to start and to end: far more than it takes, because other tests may have the cores
GRACE_S = 1.5
GRACE: list[object] = ["--grace", GRACE_S]
# A test that lasts until something happens to it.
ENDLESS: list[object] = ["--scenarios", "Server", "--server_target_qps", 100, "--min_duration", 100, *GRACE]


def check_failure(
    ended: Ended, code: int, *causes: str, rank: int | None = None, phase: str = "", within: float = START_S
) -> None:
    """Check the exit code, the one message with the causes and the rank, and the time.

    result.json, if the run directory was made, must say the same.
    """
    ended.must(code)
    message = ended.message
    for cause in causes:
        assert cause in message, f"no {cause!r} in the message\n{ended!r}"
    if rank is not None:
        assert re.search(rf"\brank {rank} \(\w+.*\), .*, pid \d+: ", message), (
            f"no rank {rank} in the message\n{ended!r}"
        )
    if phase:
        assert f"in phase '{phase}'" in message.splitlines()[0], repr(ended)
    assert ended.seconds < within, repr(ended)
    assert not re.search(r"^Traceback", ended.err, re.MULTILINE), repr(ended)
    if (ended.log_dir / "plan.json").exists():
        result = ended.result
        assert (result["status"], result["exit_code"]) == ("FAILED", code)
        told = "\n".join(failure["cause"] + failure["traceback"] for failure in result["failures"])
        assert all(cause in told for cause in causes)
        assert rank is None or rank in [failure["rank"] for failure in result["failures"]]
    else:
        assert not (ended.log_dir / "result.json").exists()


# --- bad input: exit code 2, before anything is loaded ---

FILES = {
    "unknown_section.yaml": "prefill_servers: {num_instances: 1}\ngeneration_servers: {num_instances: 1}\n",
    "misspelt_section.yaml": "context_server: {num_instances: 1}\ngeneration_servers: {num_instances: 1}\n",
    "wrong_type.yaml": "executors: {num_instances: two}\n",
    "urls.yaml": "context_servers: {num_instances: 2, urls: ['a:1']}\ngeneration_servers: {num_instances: 1,"
    " urls: ['b:1']}\n",
    "five.yaml": "executors: {num_instances: 5}\n",
    "truncated.jsonl": '{"prompt": "a"}\n{"prompt": "b',
    "empty_prompt.jsonl": '{"prompt": "a"}\n{"prompt": ""}\n',
    "empty.jsonl": "",
    "long.jsonl": '{"prompt": "short"}\n{"prompt": "' + "long " * 20 + '"}\n',
    "file": "",
    "config.json": "{}",
}

USAGE_ERRORS: dict[str, tuple[int, list[object], list[str]]] = {
    "world size": (3, ["--tensor_parallelism", 3], ["world size: 3", "must be 4"]),
    "world size, disaggregated": (2, ["--mode", "disaggregated"], ["world size: 2", "3"]),
    "world size, counts": (
        3,
        ["--mode", "disaggregated", "--num_ctx_servers", 2, "--num_gen_servers", 2],
        ["world size: 3", "5 or 6"],
    ),
    "world size, YAML": (
        3,
        ["--disagg_config", "five.yaml"],
        ["world size: 3", "5 x 1 in executors", "6", "7"],
    ),
    "unknown section": (
        3,
        ["--disagg_config", "unknown_section.yaml"],
        ["unknown_section.yaml", "prefill_servers", "context_servers"],
    ),
    "misspelt section": (
        3,
        ["--disagg_config", "misspelt_section.yaml"],
        ["'context_server'", "did you mean", "context_servers"],
    ),
    "wrong type": (
        3,
        ["--disagg_config", "wrong_type.yaml"],
        ["wrong_type.yaml", "num_instances", "two", "an integer"],
    ),
    "urls": (4, ["--disagg_config", "urls.yaml"], ["context_servers.urls", "1 given", "2"]),
    "missing data": (2, ["--dataset_path", "no.jsonl"], ["no.jsonl", "does not exist"]),
    "truncated data": (2, ["--dataset_path", "truncated.jsonl"], ["truncated.jsonl:2", "truncated?"]),
    "empty data": (2, ["--dataset_path", "empty.jsonl"], ["empty.jsonl", "is empty"]),
    "empty prompt": (
        3,
        ["--dataset_path", "empty_prompt.jsonl"],
        ["empty_prompt.jsonl:2", "prompt is empty"],
    ),
    "long prompt": (
        3,
        ["--dataset_path", "long.jsonl", "--max_seq_len", 50],
        ["long.jsonl:2", "100 tokens", "max_seq_len 50"],
    ),
    "misspelt option": (3, ["--max_ouput_len", 5], ["--max_ouput_len", "did you mean", "--max_output_len"]),
    "misspelt core option": (2, ["--core_options", "falt:raise"], ["falt", "did you mean", "fault"]),
    "no user.conf": (2, ["--user_conf", "no.conf"], ["--user_conf no.conf", "no such file"]),
    "log_dir is a file": (2, ["--log_dir", "file"], ["file", "can't be written", "File exists"]),
    "log_dir in a file": (2, ["--log_dir", "file/run"], ["file/run", "can't be written", "Not a directory"]),
    "log_dir is a model's": (2, ["--log_dir", "."], ["--log_dir .", "config.json of a model or an engine"]),
    "no such core": (2, ["--core_type", "dumy"], ["dumy", "did you mean", "dummy"]),
}


# What is wrong in a file or a plan is told in the same way as the others; which of it is found, tests/unit
# says.
ALIKE = (
    "world size, disaggregated",
    "world size, counts",
    "world size, YAML",
    "wrong type",
    "log_dir in a file",
    "unknown section",
    "misspelt section",
    "urls",
    "truncated data",
    "empty data",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in USAGE_ERRORS]
)
def test_bad_input(one: Starter, name: str) -> None:
    for file, text in FILES.items():
        (one.folder / file).write_text(text)
    ranks, options, causes = USAGE_ERRORS[name]
    check_failure(one.run(ranks, *options), USAGE, *causes)
    assert not (one.folder / "run").exists()


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
@pytest.mark.parametrize("name", ["world size", "misspelt option"])
def test_bad_input_with_mpich(both: Starter, name: str) -> None:
    test_bad_input(both, name)


def llama_folder(folder: Path, kept: float) -> Path:
    """Write a Hugging Face folder of a tiny Llama whose safetensors file has all its tensors (zeros), or only
    the first part of its bytes."""
    d, layers, vocab, intermediate, heads, kv_heads = 64, 2, 256, 128, 4, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    kv = d // heads * kv_heads
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [vocab, d],
        "model.norm.weight": [d],
        "lm_head.weight": [vocab, d],
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}_layernorm.weight": [d] for name in ("input", "post_attention")}
        shapes |= {
            f"{layer}self_attn.{name}_proj.weight": [n, d]
            for name, n in (("q", d), ("k", kv), ("v", kv), ("o", d))
        }
        shapes |= {f"{layer}mlp.{name}_proj.weight": [intermediate, d] for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = [d, intermediate]
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(shape[0] * (shape[1] if len(shape) == 2 else 1))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(end)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(content[: int(len(content) * kept)])
    return folder


# Where it is cut, test_engine_model_config varies.
@pytest.mark.parametrize(
    "kept", [0.7, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (0.001, 0.0))]
)
def test_a_truncated_model(one: Starter, tmp_path: Path, kept: float) -> None:
    folder = llama_folder(tmp_path / "model", kept)
    ended = one.run(3, "--model_path", folder, core="torch")
    check_failure(ended, USAGE, "model.safetensors", within=START_S + 10)


# and the next one: test_engine_model_config has them, and test_a_truncated_model how they are told
@pytest.mark.slow
def test_a_model_without_weights(one: Starter, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model", 1.0)
    (folder / "model.safetensors").unlink()
    ended = one.run(2, "--model_path", folder, core="torch")
    check_failure(ended, USAGE, str(folder), within=START_S + 10)


@pytest.mark.slow
def test_a_truncated_model_config(one: Starter, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model", 1.0)
    (folder / "config.json").write_text((folder / "config.json").read_text()[:100])
    ended = one.run(2, "--model_path", folder, core="torch")
    check_failure(ended, USAGE, "config.json", within=START_S + 10)


def test_a_missing_model(one: Starter) -> None:
    ended = one.run(2, "--model_path", "no/such/model", core="torch")
    check_failure(ended, USAGE, "no/such/model", within=START_S + 10)


# --- a core that raises, answers twice, or never ---


@pytest.mark.parametrize(
    ("mpi", "phase", "code"),
    [("openmpi", phase, NOT_READY) for phase in ("join", "load", "warmup")]
    + [pytest.param("openmpi", "health", NOT_READY, marks=pytest.mark.slow)]  # as load
    + [("openmpi", "test", TEST_FAILED), ("mpich", "load", NOT_READY), ("mpich", "test", TEST_FAILED)],
    indirect=["mpi"],
)
def test_a_core_that_raises(both: Starter, phase: str, code: int) -> None:
    ended = both.run(4, *GRACE, "--core_options", f"fault:raise,fault_phase:{phase},fault_rank:3,fault_at:7")
    # The constructor runs when join has been released, which is when the others load.
    shown = {"join": "load"}.get(phase, phase)
    check_failure(ended, code, "RuntimeError: injected fault in", rank=3, phase=shown)
    assert "in _fault" in ended.message
    assert "injected fault" in (ended.log_dir / "ranks" / "rank_0003.log").read_text()
    assert [failure["rank"] for failure in ended.result["failures"]] == [3]


def test_a_core_that_raises_on_every_rank(one: Starter) -> None:
    """One message has the cause once."""
    ended = one.run(5, *GRACE, "--core_options", "fault:raise,fault_phase:load")
    check_failure(ended, NOT_READY, "RuntimeError: injected fault in load")
    assert "\n  ranks 1-4: RuntimeError" in ended.message
    assert ended.err.count("RuntimeError: injected") == 1 + 1  # the cause, and the last line of its traceback


@pytest.mark.parametrize("rank", [1, 2])
def test_a_context_or_generation_core_that_raises_in_the_test(one: Starter, rank: int) -> None:
    ended = one.run(
        3, "--mode", "disaggregated", *GRACE, "--core_options", f"fault:raise,fault_rank:{rank},fault_at:20"
    )
    check_failure(ended, TEST_FAILED, "injected fault in the test, at request 20", rank=rank, phase="test")


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("ready", NOT_READY),
        ("answer", TEST_FAILED),
        ("handoff", TEST_FAILED),
        ("drain", TEST_FAILED),
        ("stop", TEST_FAILED),
    ],
)
def test_a_core_that_raises_elsewhere(one: Starter, where: str, code: int) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": f"{where}:raise:1"}
    ended = one.run(3, "--mode", "disaggregated", *GRACE, core="tests.helpers.plugin_cores:Faulty", env=env)
    check_failure(ended, code, f"ValueError: broken in {where}", rank=1)


def test_a_core_that_answers_twice(one: Starter) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": "twice:raise:2"}
    ended = one.run(4, *GRACE, core="tests.helpers.plugin_cores:Faulty", env=env)
    check_failure(ended, TEST_FAILED, "answered twice")


@pytest.mark.parametrize(
    ("mpi", "mode", "rank"),
    [
        ("openmpi", "aggregated", 3),
        pytest.param("openmpi", "disaggregated", 2, marks=pytest.mark.slow),
        ("openmpi", "disaggregated", 3),
        ("mpich", "aggregated", 2),
    ],
    indirect=["mpi"],
)
def test_a_core_that_never_answers(both: Starter, mode: str, rank: int) -> None:
    options = [
        "--mode",
        mode,
        "--stall_timeout",
        1.5,
        *GRACE,
        "--core_options",
        f"fault:silent,fault_rank:{rank},fault_at:9",
    ]
    ended = both.run(4, *options, "--control_ranks", 2)
    check_failure(
        ended,
        TEST_FAILED,
        "sent nothing for 1.5 s (--stall_timeout); open requests: 1",
        rank=rank,
        phase="test",
        within=START_S + 1.5,
    )


def test_a_slow_core_is_no_failure(one: Starter) -> None:
    options = [
        "--core_options",
        "fault:slow,fault_rank:2,fault_at:3,fault_s:1.5",
        "--stall_timeout",
        10,
        *GRACE,
    ]
    assert one.run(3, *options).must(DONE).result["status"] == "VALID"


# --- a rank that hangs: the phase's deadline ends the run ---


@pytest.mark.parametrize(
    ("mpi", "phase", "code"),
    [
        pytest.param("openmpi", "join", NOT_READY, marks=pytest.mark.slow),
        ("openmpi", "load", NOT_READY),
        pytest.param("openmpi", "health", NOT_READY, marks=pytest.mark.slow),
        ("openmpi", "warmup", NOT_READY),
        ("openmpi", "test", TEST_FAILED),
        pytest.param("mpich", "load", NOT_READY, marks=pytest.mark.slow),
        ("mpich", "test", TEST_FAILED),
    ],
    indirect=["mpi"],
)
def test_a_core_that_hangs(both: Starter, phase: str, code: int) -> None:
    shown = {"join": "load"}.get(phase, phase)
    options = [
        f"--{shown}_deadline",
        2,
        *GRACE,
        "--core_options",
        f"fault:hang,fault_phase:{phase},fault_rank:3",
    ]
    ended = both.run(4, *options)
    # Who, for how long, and where: the stack of the rank's main thread.
    causes = [f"phase '{shown}' missed its deadline of 2 s", "stuck for", "in _fault", "time.sleep"]
    check_failure(ended, code, *causes, rank=3, phase=shown, within=START_S + 2 + GRACE_S)
    if phase != "test":  # in the test the harness waits for the answers, and is late too
        assert [failure["rank"] for failure in ended.result["failures"]] == [3]
    assert (
        "stopped while the main thread was stuck" in (ended.log_dir / "ranks" / "rank_0003.log").read_text()
    )


@pytest.mark.parametrize(
    ("phase", "code"), [("ready", NOT_READY), ("drain", TEST_FAILED), ("stop", TEST_FAILED)]
)
def test_a_core_that_hangs_late(one: Starter, phase: str, code: int) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": f"{phase}:hang:2"}
    ended = one.run(4, f"--{phase}_deadline", 2, *GRACE, core="tests.helpers.plugin_cores:Faulty", env=env)
    causes = [f"phase '{phase}' missed its deadline of 2 s", "in _at", "time.sleep"]
    check_failure(ended, code, *causes, rank=2, phase=phase, within=START_S + 2 + GRACE_S)


def start_endless(starter: Starter, phase: str, *options: object) -> Command:
    """Start four ranks, which stay in `phase`: 0 is the harness, 1 the leader, unless `options` say else."""
    if "--control_ranks" not in options:
        options = (*options, "--control_ranks", 2)
    if phase != "load":
        command = starter.start(4, *ENDLESS, *options)
        if phase != "start":
            command.wait_phase(phase)
        return command
    env = {"PYTHONPATH": str(ROOT)}
    command = starter.start(
        4,
        *ENDLESS,
        "--core_options",
        "load_s:100",
        *options,
        core="tests.helpers.plugin_cores:Loading",
        env=env,
    )
    for rank in (2, 3):
        wait_until((starter.folder / f"loading_{rank}").exists, f"rank {rank} to load")
    return command


def start_and_signal(starter: Starter, rank: int, phase: str, number: int, *options: object) -> Command:
    """Start four ranks, and signal one of them in `phase`."""
    command = start_endless(starter, phase, *options)
    if phase == "start":
        pid = command.wait_rank(rank)
    else:
        pid = next(
            entry["pid"]
            for entry in json.loads((command.log_dir / "ranks.json").read_text())
            if entry["rank"] == rank
        )
    os.kill(pid, number)
    return command


@pytest.mark.parametrize(
    ("mpi", "rank", "phase"),
    [
        pytest.param("openmpi", 3, "test", marks=pytest.mark.slow),
        ("openmpi", 1, "test"),
        ("mpich", 3, "test"),
    ],
    indirect=["mpi"],
)
def test_a_stopped_rank(both: Starter, rank: int, phase: str) -> None:
    """A rank that gets SIGSTOP sends no heartbeat either."""
    command = start_and_signal(both, rank, phase, signal.SIGSTOP, "--heartbeat_timeout", 3)
    check_failure(command.end(), INSTANCE_LOST, rank=rank, phase=phase, within=START_S + 3 + GRACE_S + 3)


@pytest.mark.parametrize(
    ("mpi", "rank"),
    [pytest.param("openmpi", 2, marks=pytest.mark.slow), ("openmpi", 0), ("mpich", 2)],
    indirect=["mpi"],
)
def test_a_rank_that_stops_at_its_start(both: Starter, rank: int) -> None:
    """Before and in MPI_Init only the launcher's environment can tell who it is."""
    command = start_and_signal(
        both, rank, "start", signal.SIGSTOP, "--join_deadline", 4, "--heartbeat_timeout", 3
    )
    ended = command.end()
    assert ended.code in (NOT_READY, INSTANCE_LOST), repr(ended)
    assert "MPI_Init" in ended.err or re.search(rf"\brank {rank}\b", ended.err), repr(ended)
    assert ended.seconds < START_S + 4 + 3 + 2 * GRACE_S, repr(ended)


@pytest.mark.parametrize(
    ("mpi", "control"),
    [("openmpi", 1), pytest.param("openmpi", 2, marks=pytest.mark.slow), ("mpich", 1)],
    indirect=["mpi"],
)
def test_a_stopped_rank_0(both: Starter, control: int) -> None:
    options = ["--heartbeat_timeout", 3, "--control_ranks", control]
    command = start_and_signal(both, 0, "test", signal.SIGSTOP, *options)
    ended = command.end()
    ended.must(INSTANCE_LOST)
    assert re.search(r"\brank 0\b", ended.err), repr(ended)
    assert ended.seconds < START_S + 3 + 4 * GRACE_S + 3, repr(ended)


# --- a rank that is killed ---


@pytest.mark.parametrize(
    ("mpi", "rank", "phase"),
    [(mpi, *case) for mpi in ("openmpi", "mpich") for case in ((3, "load"), (3, "test"), (1, "test"))],
    indirect=["mpi"],
)
def test_a_killed_rank(both: Starter, rank: int, phase: str) -> None:
    command = start_and_signal(both, rank, phase, signal.SIGKILL)
    ended = command.end()
    check_failure(
        ended, INSTANCE_LOST, "the process has ended", rank=rank, phase=phase, within=START_S + GRACE_S
    )
    assert not ended.left, "shared memory"


@pytest.mark.parametrize(
    ("mpi", "phase", "control"),
    [
        ("openmpi", "load", 1),
        pytest.param("openmpi", "load", 2, marks=pytest.mark.slow),
        ("openmpi", "test", 1),
        ("openmpi", "test", 2),
        ("mpich", "load", 2),
        ("mpich", "test", 1),
    ],
    indirect=["mpi"],
)
def test_a_killed_rank_0(both: Starter, phase: str, control: int) -> None:
    """Nobody is left to write result.json, so the launcher reports it. Rank 0 is the leader, too, or not."""
    options = ["--heartbeat_timeout", 3, "--control_ranks", control]
    command = start_and_signal(both, 0, phase, signal.SIGKILL, *options)
    ended = command.end()
    ended.must(INSTANCE_LOST)
    assert "rank 0 ended without an exit code" in ended.err
    assert ended.seconds < START_S + 3 + 2 * GRACE_S, repr(ended)


def test_a_killed_rank_makes_others_fail(both: Starter) -> None:
    """The others end, too, and are named neither as lost nor for errors that followed."""
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_RANK": "2"}
    ended = both.run(4, *ENDLESS, core="tests.helpers.plugin_cores:Orphaned", env=env)
    check_failure(ended, INSTANCE_LOST, "the process has ended", rank=2, phase="test")
    assert [failure["rank"] for failure in ended.result["failures"]] == [2]


@pytest.mark.slow  # as test_a_killed_rank
def test_a_core_that_exits(one: Starter) -> None:
    ended = one.run(4, *GRACE, "--core_options", "fault:exit,fault_rank:2,fault_at:5")
    check_failure(ended, INSTANCE_LOST, "the process has ended", rank=2, phase="test")


# --- interrupts ---


@pytest.mark.parametrize(
    ("phase", "number", "whole_group"),
    [("load", signal.SIGINT, True), ("test", signal.SIGINT, False), ("test", signal.SIGTERM, True)],
)
def test_an_interrupt(both: Starter, phase: str, number: signal.Signals, whole_group: bool) -> None:
    command = start_endless(both, phase)
    if whole_group:
        command.signal_group(number)
    else:
        command.process.send_signal(number)
    ended = command.end()
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[number]
    check_failure(ended, 128 + number, f"interrupted ({name})", phase=phase)


@pytest.mark.parametrize("rank", [0, 3])
def test_an_interrupt_before_mpi_is_there(both: Starter, rank: int) -> None:
    """The interrupt comes as soon as a rank is seen, while it imports or is in MPI_Init."""
    command = both.start(4, *ENDLESS)
    command.wait_rank(rank)
    command.signal_group(signal.SIGINT)
    ended = command.end()
    ended.must(128 + signal.SIGINT)
    assert len(ended.messages) <= 1, repr(ended)
    assert "Traceback" not in ended.err, repr(ended)
    assert ended.seconds < START_S + GRACE_S, repr(ended)


# --- disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Any]:
    """Yield what makes a file system of some kilobytes."""
    mounted: list[Path] = []

    def make(kilobytes: int) -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", path], capture_output=True
        ).returncode:
            pytest.skip("mounting a small tmpfs takes root, and here even root may not")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_disk_that_is_full_at_the_start(one: Starter, small_disk: Any) -> None:
    ended = one.run(3, *GRACE, log_dir=small_disk(4) / "run")
    ended.must(NOT_READY)
    assert "No space left on device" in ended.message
    assert str(ended.log_dir) in ended.message
    assert ended.seconds < START_S


def test_a_disk_that_the_answers_fill(both: Starter, small_disk: Any) -> None:
    log_dir = small_disk(512) / "run"
    options = [*ENDLESS, "--server_target_qps", 400, "--core_options", "tpot_ms:0.1", "--save_outputs"]
    ended = both.run(3, *options, log_dir=log_dir)
    ended.must(TEST_FAILED)
    assert "No space left on device" in ended.message
    assert "outputs.jsonl" in ended.message or "requests.bin" in ended.message
    assert "in phase 'test'" in ended.message
    assert ended.seconds < START_S + GRACE_S + 5


def test_a_disk_that_loadgen_fills(one: Starter, small_disk: Any, tmp_path: Path) -> None:
    """LoadGen writes its log of answers (1 MB here) without looking whether that worked."""
    samples = make_samples(tmp_path / "many.jsonl", [10] * 1000)
    options = ["--test_mode", "AccuracyOnly", "--dataset_path", samples.path, "--max_output_len", 128]
    ended = one.run(3, *GRACE, *options, log_dir=small_disk(512) / "run")
    ended.must(TEST_FAILED)
    # our record of the requests finds the disk full, or the verdict finds LoadGen's logs incomplete
    assert "disk full" in ended.message or "requests.bin: No space left on device" in ended.message
    assert ended.seconds < START_S


# --- ranks that were started differently, which takes an mpirun with two programs ---


@pytest.mark.parametrize(
    ("first", "others", "causes"),
    [
        (["--max_output_len", 8], ["--max_output_len", 9], ["ranks 1-2 were started", "--max_output_len is 9"
                                                                                      " there and 8 here"]),
        (["--seed", 1], ["--seed", "one"], ["ranks 1-2", "--seed one"]),
        (["--sede", 1], [], ["rank 0: ", "--sede", "did you mean", "--seed"]),
    ],
)  # fmt: skip
def test_different_configurations(
    both: Starter, first: list[object], others: list[object], causes: list[str]
) -> None:
    ended = run_two_programs(both, 1, first, 2, others)
    check_failure(ended, USAGE, *causes)


def test_different_data(both: Starter, samples: Samples, tmp_path: Path) -> None:
    """The same samples in another file are refused, because nobody knows for how long they are the same."""
    other = tmp_path / "other.jsonl"
    other.write_bytes(samples.path.read_bytes())
    ended = run_two_programs(both, 2, ["--dataset_path", samples.path], 1, ["--dataset_path", other])
    check_failure(ended, USAGE, "rank 2 was started with another configuration than rank 0", "--dataset_path")


def run_two_programs(
    starter: Starter, n_first: int, first: list[object], n_others: int, others: list[object]
) -> Ended:
    """Run a plain `mpirun -n … run FIRST : -n … run OTHERS`; the exit code is the one that rank 0 told.

    Hydra kills the other ranks as soon as one has ended with an error, and then returns 9: only `mpillm
    mpirun` prevents that.
    """
    program = [
        starter.python,
        "-m",
        "mpillm",
        "run",
        "--core_type",
        "dummy",
        "--log_dir",
        starter.folder / "run",
    ]
    own = ["--oversubscribe", "--bind-to", "none"] if starter.mpi == "openmpi" else []
    line = [
        Path(starter.python).parent / "mpirun",
        *own,
        "-n",
        n_first,
        *program,
        *first,
        ":",
        "-n",
        n_others,
        *program,
        *others,
    ]
    told = starter.folder / "exit_code"
    env = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MPILLM_EXIT_FILE": str(told),
    }
    ended = starter.command(line, env=env).end(tidy=starter.mpi == "openmpi")
    assert ended.code != DONE, repr(ended)
    assert starter.mpi == "mpich" or ended.code == int(told.read_text())
    ended.code = int(told.read_text())
    return ended
