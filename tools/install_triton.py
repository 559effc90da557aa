"""``python -m tools.install_triton PREFIX``: make `PREFIX/bin/tritonserver` from the wheel nvidia-pytriton.

The wheel has a stub of the Python backend for each version of Python, which needs that version's shared
library. Without it, or if the server does not become ready with a Python model, nothing is installed, exit
code 1.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.command import Command
from mpillm.stages.servers import Server, ServerFailed, Servers

_READY_S = 120.0  # it takes 2 s on two cores
_CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""
_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


def main(argv: Sequence[str]) -> int:
    """Prepare the files, write the program, and finally the stamp `PREFIX/installed`."""
    prefix = Path(argv[0]).absolute()
    own = Path(sysconfig.get_path("purelib"))
    packages = prefix / own.relative_to(sys.prefix)
    server = packages / "pytriton" / "tritonserver"
    version = sysconfig.get_python_version()
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        print(f"make triton: this tritonserver has no Python backend for Python {version}", file=sys.stderr)
        return 1
    backend = Path(shutil.copy2(stub, server / "backends" / "python"))
    program = server / "bin" / "tritonserver"
    for path in (program, backend):
        path.chmod(0o755)
    libraries = str(packages / "nvidia_pytriton.libs")
    if _missing(backend, libraries):
        # Python's library may be outside the loader's path. Only then add its folder: a distribution's folder
        # has other libraries, such as an MPI's, which would take precedence over the packages' libraries.
        libraries += f":{sysconfig.get_config_var('LIBDIR') or ''}"
    if missing := [name for path in (program, backend) for name in _missing(path, libraries)]:
        print(
            f"make triton: tritonserver needs {', '.join(missing)}, which this machine lacks"
            f" (libpython is Debian's package libpython{version})",
            file=sys.stderr,
        )
        return 1
    start = prefix / "bin" / "tritonserver"
    backends = shlex.quote(f"--backend-directory={server / 'backends'}")
    start.write_text(
        "#!/bin/sh\n"
        f"export LD_LIBRARY_PATH={shlex.quote(libraries)}\n"
        f'export PATH={shlex.quote(str(start.parent))}:"$PATH"\n'  # Python in it finds its packages by PATH
        f'exec {shlex.quote(str(program))} {backends} "$@"\n',
        encoding="utf-8",
    )
    start.chmod(0o755)
    environment = packages / "mpillm-environment.pth"
    environment.write_text(f"import site; site.addsitedir({str(own)!r})\n", encoding="utf-8")
    if problem := _starts(start):
        start.unlink()
        print(f"make triton: tritonserver is installed, but does not run here: {problem}", file=sys.stderr)
        return 1
    (prefix / "installed").write_text(f"{version}\n", encoding="utf-8")
    return 0


def _missing(path: Path, libraries: str) -> list[str]:
    """Return the missing shared libraries of a program."""
    env = {**os.environ, "LD_LIBRARY_PATH": libraries}
    lines = subprocess.run(["ldd", path], capture_output=True, text=True, env=env).stdout.splitlines()
    return [line.split()[0] for line in lines if "not found" in line]


def _starts(program: Path) -> str:
    """Return why the server does not become ready with a Python model; empty if it does."""
    with tempfile.TemporaryDirectory(prefix="mpillm-") as name, socket.socket() as probe:
        model = Path(name) / "models" / "first"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
        (model / "1" / "model.py").write_text(_MODEL, encoding="utf-8")
        probe.bind(("", 0))
        port = probe.getsockname()[1]
        probe.close()
        options = ("--allow-grpc=false", "--allow-metrics=false", f"--http-port={port}")
        command = Command((str(program), f"--model-repository={model.parent}", *options))
        health = f"http://localhost:{port}/v2/health/ready"
        try:
            with Servers(Path(name)) as running:
                running.start_server(Server("tritonserver", command, {"HTTP": port}, (health,)))
                running.wait_ready(_READY_S)
        except (ConfigError, ServerFailed) as error:
            return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
