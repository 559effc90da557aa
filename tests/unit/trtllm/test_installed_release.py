"""What follows from the installed release of TensorRT-LLM, which is read without an import of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.programs.servers import server_options
from mpillm.programs.servers.kind import ServerSpec
from mpillm.programs.servers.kinds import kind_of
from mpillm.programs.servers.server_options import Release
from mpillm.trtllm.installed import check_engines, installed_release
from tests.helpers.support import USAGE
from tests.helpers.trtllm_cores import CORES

MANY = "".join(f'@click.option("--name_{number}")\n' for number in range(30))
BOTH = '@click.option("--config", "--extra_llm_api_options", type=str)\n@click.option("--host")\n' + (
    '@click.option("--port")\n@click.option("--tp_size")\n'
)
OLD = BOTH.replace('"--config", ', "") + '@click.option("-c", "--config_file")\n'
NEWER = "1.3.0rc29"

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install `trtllm-serve` in another Python: a program, and a package that must not be imported."""
    monkeypatch.setattr(server_options, "_releases", {})

    def installed(version: str, options: str = BOTH) -> Path:
        package = tmp_path / "site" / "tensorrt_llm"
        (package / "commands").mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('imported')\n")
        (package / "version.py").write_text(f'__version__ = "{version}"\n')
        (package / "commands" / "serve.py").write_text(options + MANY)
        (tmp_path / "bin").mkdir()
        (program := tmp_path / "bin" / "trtllm-serve").write_text(f"#!{sys.executable}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=":")
        return package

    return installed


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this Python the metadata of a release without engines."""
    metadata(tmp_path, monkeypatch, NEWER)


def metadata(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    (path := folder / "own" / f"tensorrt_llm-{version}.dist-info").mkdir(parents=True)
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder / "own"))


@pytest.mark.parametrize(
    ("version", "has_engines"),
    [
        ("0.20.0", True),
        ("1.2.1", True),
        ("1.2.0rc6.post3", True),
        ("1.3.0rc20", True),
        ("1.3.0rc20+cu130", True),
        ("1.3.0rc22.post1", False),
        (NEWER, False),
        ("1.3.0", False),
        ("1.4.0rc1", False),
        ("2.0", False),
        ("of-a-branch", True),  # unknown: TensorRT-LLM itself decides
    ],
)
def test_releases_with_engines(
    version: str, has_engines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata(tmp_path, monkeypatch, version)
    assert installed_release().version == version
    if has_engines:
        check_engines("it")
    else:
        with pytest.raises(
            ConfigError, match=r"^it: TensorRT-LLM \S+ runs no engines; 1\.3\.0rc20 is the last"
        ):
            check_engines("it")


def test_no_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_release().version == ""
    check_engines("it")


def test_the_release_of_another_python(install: Install) -> None:
    install("1.4.0rc1")
    with pytest.raises(ConfigError, match=r"TensorRT-LLM 1\.4\.0rc1 runs no engines"):
        check_engines("it")


def test_a_newer_release_with_the_tools(install: Install) -> None:
    """The source of trtllm-build counts more than the number of the release."""
    (install("1.3.0rc22") / "commands" / "build.py").touch()
    check_engines("it")


@pytest.mark.parametrize(
    "words",
    [
        ["generate-engines", "--core_type=trtllm_executor", "--model_path=m"],
        ["generate-engines", "--harness_type=triton", "--model_path=m"],
        ["generate-engines", "--core_type=trtllm_hlapi", "--trtllm_runtime_flags=trtllm_backend:cpp"],
        ["generate-triton-config", "--engine_dir=e"],
        ["run-llm-server", "--harness_type=triton", "--model_path=m"],
        [
            "run-llm-server",
            "--core_type=trtllm_endpoint",
            "--engine_dir=e",
            "--trtllm_runtime_flags=trtllm_backend:cpp",
        ],
    ],
)
@pytest.mark.usefixtures("newer")
def test_stages_with_engines_end_at_once(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--dry_run"]) == USAGE
    assert (
        f"TensorRT-LLM {NEWER} runs no engines; 1.3.0rc20 is the last release that does (stable: 1.2);"
        " use the Hugging Face folder, with --core_type trtllm_hlapi, --server=trtllm-serve,"
        " or in tritonserver the model.yaml of the LLM API backend" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", CORES)
@pytest.mark.usefixtures("newer")
def test_cores_with_engines_end_before_the_import(name: str, make: Callable[..., Any]) -> None:
    flags = ["--trtllm_runtime_flags=trtllm_backend:cpp"] if name == CORES[1] else []
    with pytest.raises(ConfigError, match=rf"^--core_type {name}: TensorRT-LLM {NEWER} runs no engines"):
        make(name, "--scenarios=Offline", *flags, check=True)
    assert "tensorrt_llm" not in sys.modules


@pytest.mark.usefixtures("newer")
def test_the_pytorch_backend_goes_on(make: Callable[..., Any]) -> None:
    make(CORES[1], "--scenarios=Offline", check=True)


@pytest.mark.usefixtures("newer")
def test_a_yaml_of_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "d.yaml").write_text(
        "model: e\nbackend: trt\ncontext_servers: {urls: ['a:1']}\ngeneration_servers: {urls: ['a:2']}\n"
    )
    words = ["run-llm-server", "--core_type=trtllm_disagg", f"--disagg_config={path}", "--dry_run"]
    assert main(words) == USAGE
    assert f"{path}: backend trt: TensorRT-LLM {NEWER} runs no engines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "options", "name"),
    [("1.4.0rc1", BOTH, "--config"), ("1.2.1", BOTH, "--config"), ("1.1.0", OLD, "--extra_llm_api_options")],
)
def test_the_name_of_the_option_for_a_file(
    install: Install,
    version: str,
    options: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(version, options)
    assert argv(kind_of("trtllm-serve").release())[-2:] == [name, "run/server_0.yaml"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert main(["run-llm-server", "--core_type=trtllm_endpoint", "--model_path=m", "--dry_run"]) == 0
    assert f" {name} mpillm-runs/servers/extra_llm_api_options.yaml" in capsys.readouterr().out


def argv(release: Release | None, *args: str) -> list[str]:
    spec = ServerSpec(kind_of("trtllm-serve"), "m", {}, folder=Path("run"), release=release, args=args)
    return list(spec.command().argv)


def test_options_of_the_release(install: Install) -> None:
    install("1.3.0rc3")
    release = kind_of("trtllm-serve").release()
    assert release is not None and str(release) == "tensorrt_llm 1.3.0rc3"
    assert release.unknown(argv(release, "--tp_size=2", "--tp_sise", "2")) == ["--tp_sise"]


def test_a_file_of_the_user_replaces_the_own_one() -> None:
    """trtllm-serve reads the last of its files only; mpillm's switches the prefix cache off."""
    notes = kind_of("trtllm-serve").notes
    assert notes is not None
    for args in (("--config", "f"), ("--extra_llm_api_options=f",)):
        (line,) = notes(ServerSpec(kind_of("trtllm-serve"), "m", {}, args=args))
        assert line.startswith(f"--server_args: {args[0].split('=')[0]}: trtllm-serve ignores mpillm's file")
    assert notes(ServerSpec(kind_of("trtllm-serve"), "m", {}, args=("--config_file", "f"))) == ()


def test_a_tritonserver_without_the_backend() -> None:
    log = "E1 model.cc:1] unable to find backend library for backend 'tensorrtllm', try specifying runtime"
    assert kind_of("tritonserver").explain(log).startswith("it has no backend for engines, as in releases")
