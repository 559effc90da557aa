"""Baseline of vLLM for CPUs, in a separate Python environment."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import vllm_process
from disagg.errors import ConfigError
from launch.children import Children
from launch.environment import clean_environment

_DEADLINE_S = 900.0  # for loading, and for a turn: vLLM compiles at its first start, for minutes
_LOOK_S = 0.2
_EXIT_S = 60.0  # until the output of a process that has disconnected is complete


class VllmBaseline:
    """A model that generates greedily, with answers of one length.

    vLLM's processes poll for work, so they are suspended between turns.
    """

    def __init__(self, python: str, children: Children, folder: Path, n_threads: int, **options: Any) -> None:
        """Start vLLM and load the model; takes minutes. Raises ConfigError if that fails.

        `folder`: for a socket and the log. `options`: of `vllm.LLM`.
        """
        if shutil.which(python) is None:
            raise ConfigError(
                f"--vllm_python {python}: there is no such program; it is the Python of an environment with"
                " vLLM for CPUs (make test-peers makes .venv-peers)"
            )
        self._children = children
        cores = sorted(os.sched_getaffinity(0))[:n_threads]
        environment = {
            **clean_environment(os.environ),
            # vLLM's compilers are in the folder of its Python.
            "PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        address = folder / "vllm.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            listener.settimeout(_LOOK_S)
            command = (python, "-I", str(vllm_process.__file__), str(address))
            self._child = children.start("vLLM", command, environment, folder / "vllm.log")
            deadline = time.monotonic() + _DEADLINE_S
            while True:
                try:
                    connection, _ = listener.accept()
                    break
                except TimeoutError:
                    if self._child.process.poll() is not None or time.monotonic() > deadline:
                        raise self._failed("did not start") from None
        with connection:
            connection.settimeout(_DEADLINE_S)
            self._lines = connection.makefile("rw", encoding="utf-8")
        self.versions: str = self._request(options)

    def answer(self, prompts: list[list[int]], n_output: int) -> list[list[int]]:
        """Answer all prompts, which vLLM batches."""
        self._signal("resume")
        answers: list[list[int]] = self._request({"prompts": prompts, "n_output": n_output})
        self._signal("suspend")
        return answers

    def close(self) -> None:
        """Stop vLLM."""
        self._signal("resume")
        self._lines.close()

    def _request(self, message: object) -> Any:
        """Send a line of JSON; return the response."""
        try:
            self._lines.write(json.dumps(message) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except TimeoutError:
            raise self._failed(f"has not answered in {_DEADLINE_S:.0f} s") from None
        except OSError:  # the process has ended
            line = ""
        if not line:
            self._children.wait(self._child, _EXIT_S)
            raise self._failed("ended")
        return json.loads(line)

    def _signal(self, action: str) -> None:
        process = psutil.Process(self._child.process.pid)
        for each in (process, *process.children(recursive=True)):
            getattr(each, action)()

    def _failed(self, reason: str) -> ConfigError:
        return ConfigError(f"--against vllm: vLLM {reason}; the end of its output:\n{self._child.tail()}")
