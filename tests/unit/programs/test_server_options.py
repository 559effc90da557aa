"""Options that the installed release of a server knows, read from its source."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.options.fields import FIELDS
from mpillm.options.layers import layers_of
from mpillm.options.run_config import RunConfig
from mpillm.programs.servers import server_options
from mpillm.programs.servers.kind import ServerSpec
from mpillm.programs.servers.kinds import kind_of
from mpillm.programs.servers.server_options import OptionSource, Release
from mpillm.runtime.own_servers import server_lines, server_specs

SGLANG = """class Fields:
    model_path: str
    served_model_name: str
    host: str
    port: int
    enable_metrics: bool
    disable_radix_cache: bool
    cuda_graph_max_bs_decode: int
    disable_cuda_graph: bool
parser.add_argument("--tp-size", "--tensor-parallel-size")
"""
VLLM = """class Fields:
    served_model_name: str
    host: str
    port: int
parser.add_argument("--enable-prefix-caching")
parser.add_argument("--kv-transfer-config")
parser.add_argument("--max-num-seqs")
"""
MANY = "".join(f"    field_{number}: int\n" for number in range(200))
SOURCES = {
    "sglang": ("0.5.23", "srt/server_args.py", SGLANG),
    "vllm": ("0.33.0", "engine/arg_utils.py", VLLM),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a program, and a package with the source of its parser."""
    monkeypatch.setattr(server_options, "_releases", {})

    def installed(name: str, more: str = "", version: str = "", head: str = f"#!{sys.executable}\n") -> Path:
        newest, file, text = SOURCES[name]
        (path := tmp_path / "site" / name / file).parent.mkdir(parents=True)
        path.write_text(text + more + "class More:\n" + MANY)
        (tmp_path / "site" / name / "_version.py").write_text(
            f"__version__ = version = '{version or newest}'\n"
        )
        (tmp_path / "bin").mkdir()
        (program := tmp_path / "bin" / name).write_text(head)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=":")
        return tmp_path / "site" / name

    return installed


def lines(kind: str, args: str = "", **options: str) -> list[str]:
    values = {
        "server": kind,
        "model_path": "/models/it",
        **({"server_args": args} if args else {}),
        **options,
    }
    config = RunConfig(layers_of(values, FIELDS))
    plan = disagg.plan(disagg.generate("aggregated", 2), 2, ["a", "a"], 1)
    return [
        line for line in server_lines(plan, server_specs(config, plan, {})) if line.startswith("--server")
    ]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            "--cuda-graph-max-bs 8",
            "sglang 0.5.23 has no --cuda-graph-max-bs; use --cuda-graph-max-bs-decode$",
        ),
        ("--torchao-config=int8wo", "has no --torchao-config; leave it out$"),
        ("--tp_size 2", r"has no --tp_size \(did you mean '--tp-size'\?\)$"),
        ("--tp-size 2 --no-such-option", "^--server_args: sglang 0.5.23 has no --no-such-option$"),
    ],
)
def test_unknown_options_are_refused(install: Any, args: str, why: str) -> None:
    install("sglang")
    with pytest.raises(ConfigError, match=why) as error:
        lines("sglang", args)
    assert error.value.about == ("server_args",)


def test_an_option_that_mpillm_uses_is_refused(install: Any) -> None:
    install("sglang")
    why = "^--server: sglang 0.5.23 has no --max-running-requests, which mpillm uses$"
    with pytest.raises(ConfigError, match=why):
        lines("sglang", max_batch_size="8")


def test_options_of_an_older_release(install: Any) -> None:
    """The release decides, not the newest one that mpillm knows."""
    install("sglang", "parser.add_argument('--cuda-graph-max-bs')\n", version="0.5.14")
    assert lines("sglang", "--cuda-graph-max-bs 8") == []


def test_known_options(install: Any) -> None:
    """Also the beginning of a name, a switch's --no-, and a name that another file of the package defines."""
    folder = install("sglang")
    (folder / "elsewhere.py").write_text('parser.add_argument("--of-a-backend")\n')
    words = "--tensor-par=2 --no-enable-metrics --of-a-backend --cuda-graph-max-bs-decode 8 -x -1"
    assert lines("sglang", words) == []


def test_spellings_of_vllm(install: Any) -> None:
    install("vllm")
    assert lines("vllm", "--max_num_seqs=4 --kv-transfer-config.kv_role x --disable-prefix-caching") == []
    with pytest.raises(ConfigError, match=r"has no --max-num-seks \(did you mean '--max-num-seqs'\?\)"):
        lines("vllm", "--max_num_seks 4")


def test_deprecated_options_are_listed(install: Any) -> None:
    install("sglang")
    (line,) = lines("sglang", "--disable-cuda-graph")
    assert line.startswith("--server_args: sglang 0.5.23 deprecates --disable-cuda-graph; use --cuda-graph-")
    assert lines("sglang") == []


@pytest.mark.parametrize(
    ("head", "package", "why"),
    [
        ("#!/bin/sh\nexec other\n", True, "sglang is not a Python script"),
        (f"#!{sys.executable}\n", False, "finds no package sglang"),
        ("#!/no/such/python3\n", True, "/no/such/python3: "),
    ],
)
def test_options_that_cannot_be_read(
    install: Any, monkeypatch: pytest.MonkeyPatch, head: str, package: bool, why: str
) -> None:
    """They are not checked, and a line says so if the user has set any."""
    install("sglang", head=head)
    if not package:
        monkeypatch.setenv("PYTHONPATH", "")
    assert lines("sglang") == []
    (line,) = lines("sglang", "--nonsense")
    assert line.startswith("--server_args: not checked before the start: ") and why in line


def test_scripts_that_name_their_python_in_a_second_line(install: Any) -> None:
    """As pip writes them if the path is long."""
    install("sglang", head=f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n")
    with pytest.raises(ConfigError, match="has no --nonsense"):
        lines("sglang", "--nonsense")


def test_a_release_that_defines_options_elsewhere(install: Any) -> None:
    folder = install("sglang")
    (folder / "srt" / "server_args.py").rename(folder / "parser.py")
    (line,) = lines("sglang", "--nonsense")
    assert "does not define them where mpillm looks" in line


def test_a_slow_search_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    monkeypatch.setattr(server_options, "_SEARCH_S", -1.0)
    assert Release(OptionSource("vllm", ("*.py",)), "1", tmp_path).unknown(["--nonsense"]) == []


@pytest.mark.parametrize(
    ("kind", "line", "meaning"),
    [
        (
            "sglang",
            "error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode,",
            "it does not know --cuda-graph-max-bs (use --cuda-graph-max-bs-decode): look at --server_args",
        ),
        (
            "vllm",
            "vllm: error: unrecognized arguments: --disable-log-requests --key=secret",
            "it does not know --disable-log-requests (use --no-enable-log-requests), --key: look at",
        ),
        (
            "vllm",
            "error: unrecognized arguments: x",
            "it does not know one of its options: look at --server_args",
        ),
        (
            "command:srv {port}",
            "Error: No such option: --foo",
            "it does not know --foo: look at --server_args",
        ),
    ],
)
def test_a_server_s_own_line_about_an_option(kind: str, line: str, meaning: str) -> None:
    explanation = kind_of(kind).explain(f"before\n{line}\nafter")
    assert explanation.startswith(meaning) and "secret" not in explanation


def vllm_argv(release: Release | None, **more: Any) -> list[str]:
    spec = ServerSpec(kind_of("vllm"), "m", {}, folder=Path("run"), release=release, stall_s=120, **more)
    return list(spec.command().argv)


def test_the_watchdog_of_vllm(install: Any) -> None:
    """It writes the stacks of a hung step before the run ends; a release without it gets no such option."""
    install("vllm", "parser.add_argument('--watchdog-config')\n")
    argv = vllm_argv(kind_of("vllm").release())
    config = json.loads(argv[argv.index("--watchdog-config") + 1])
    folder = str(Path("run/server_0_stacks").absolute())
    assert config == {"dump_dir": folder, "timeout": 60, "check_interval": 10}
    own = ("--watchdog-config.timeout", "9")
    assert "--watchdog-config" not in vllm_argv(kind_of("vllm").release(), args=own)
    assert "--watchdog-config" not in vllm_argv(None)


def test_no_watchdog_in_an_older_vllm(install: Any) -> None:
    install("vllm", version="0.32.0")
    assert "--watchdog-config" not in vllm_argv(kind_of("vllm").release())


@pytest.mark.parametrize(
    "args",
    ["--kv-transfer-config.kv_load_failure_policy recompute", '{"kv_load_failure_policy": "recompute"}'],
)
def test_prompts_that_vllm_computes_again_are_listed(args: str) -> None:
    notes = kind_of("vllm").notes
    assert notes is not None
    spec = ServerSpec(kind_of("vllm"), "m", {}, role="generation", args=tuple(args.split(" ", 1)))
    (line,) = notes(spec)
    assert "kv_load_failure_policy recompute: generation servers compute a prompt again" in line
    assert notes(ServerSpec(kind_of("vllm"), "m", {}, role="generation")) == ()
