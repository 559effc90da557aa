"""launch-triton-server makes the command lines of TensorRT-LLM's launch_triton_server.py from its options.

Source: triton-inference-server/tensorrtllm_backend 0.19, scripts/launch_triton_server.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mpillm.cli import main
from mpillm.devices import Gpu
from mpillm.triton.commands import launch_triton_server

PARALLEL, PLAIN = "llama", "preprocessing"
LAST = ["--disable-auto-complete-config", "--backend-config=python,shm-region-prefix-name=prefix0_{}_"]
Print = Callable[..., str]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Print:
    """Return what prints the command of a repository of TensorRT-LLM's backend."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for program in ("mpirun", "tritonserver"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    for name, backend in ((PARALLEL, "tensorrtllm"), (PLAIN, "python")):
        (tmp_path / "repo" / name).mkdir(parents=True)
        (tmp_path / "repo" / name / "config.pbtxt").write_text(f'backend: "{backend}"\n')

    def run(*words: str) -> str:
        assert main(["launch_triton_server.py", "--model_repo=repo", "--dry_run", *words]) == 0
        return capsys.readouterr().out.strip()

    return run


def servers(line: str) -> list[list[str]]:
    """Return the words of each tritonserver, from its model repository on, without our guard."""
    parts = [part.split() for part in line.split(" : ")]
    return [part[part.index("--model-repository=repo") :] for part in parts]


def ports(grpc: int = 8001) -> list[str]:
    return [f"--grpc-port={grpc}", "--http-port=8000", "--metrics-port=8002"]


def last(rank: int) -> list[str]:
    return [word.format(rank) for word in LAST]


def test_a_server_for_each_rank(printed: Print) -> None:
    """Rank 0 serves and logs; the others load the models that are named, and nothing else."""
    more = ("--log", "--log-file=x.txt", "--multimodal_gpu0_cuda_mem_pool_bytes=300")
    name = f"--tensorrt_llm_model_name={PARALLEL},{PLAIN}"
    line = printed("--world_size=3", name, "--grpc_port=9001", "--oversubscribe", *more)
    head, repo = line.split(" -n 1 ")[0].split(), "--model-repository=repo"
    assert head[0].endswith("/mpirun") and head[-1] == "--oversubscribe"
    logs = ["--log-verbose=3", "--log-file=x.txt", "--cuda-memory-pool-byte-size=0:300"]
    only = ["--model-control-mode=explicit", f"--load-model={PARALLEL}", f"--load-model={PLAIN}"]
    assert servers(line) == [
        [repo, *ports(9001), *logs, *last(0)],
        *([repo, *ports(9001), *only, *last(rank)] for rank in (1, 2)),
    ]


def test_one_server(printed: Print, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is plain, or an orchestrator's, whose models may start their ranks and share no memory of GPUs."""
    for words in ((), ("--no-mpi",)):
        assert servers(line := printed(*words)) == [["--model-repository=repo", *ports(), *last(0)]]
        assert line.split("/")[-1].startswith("tritonserver ")
    gpu = Gpu("a", "H200", 1, 1)
    monkeypatch.setattr(launch_triton_server, "visible_gpus", lambda: (gpu, gpu))
    line = printed("--multi-model", f"--tensorrt_llm_model_name={PARALLEL}")
    assert line.startswith("TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1 ")
    pools = ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
    pools += [f"--cuda-memory-pool-byte-size={i}:0" for i in (0, 1)]
    assert servers(line) == [["--model-repository=repo", *ports(), *pools, *last(0)]]
    line = printed("--multi-model", "--disable-spawn-processes", f"--tensorrt_llm_model_name={PARALLEL}")
    assert line.startswith("TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0 ")
    assert servers(line) == [["--model-repository=repo", *ports(), *last(0)]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world_size=2", "--multi-model"], "with --multi_model the models start their ranks"),
        (["--world_size=2"], "--world_size 2: repo has no model with several ranks, or named tensorrt_llm"),
        (["--world_size=2", "--no-mpi"], "without MPI there is one rank"),
        (["--tensorrt_llm_model_name=lama"], "--tensorrt_llm_model_name lama: repo has no such model"),
        (["--model_repo=other"], "--model_repo: other has no model in it"),
        (["--worldsize=2"], "did you mean '--world_size'?"),
        ([], "a tritonserver runs already, process 7; --force starts another"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str],
    message: str,
    printed: Print,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Other:
        pid = 7
        info = {"name": "tritonserver"}  # noqa: RUF012

    monkeypatch.setattr(psutil, "process_iter", lambda _names: [Other])
    assert main(["launch-triton-server", "--model_repo=repo", *words]) == 2
    assert message in capsys.readouterr().err
