"""What a new user types, with the answer in plain words: never a traceback, never silence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm import cli
from mpillm.cores.registry import check_core
from mpillm.data.dataset import load_dataset
from mpillm.data.preprocessed.loader import PreprocessedLoader
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.engine.shape.find_model import locate
from mpillm.errors import ExitCode
from mpillm.options.options import parse_run
from mpillm.options.parsers import http_urls


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the message of a command that is refused."""
    assert cli.main(list(words)) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and len(captured.err.splitlines()) == 1, captured.err
    return captured.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["-n", "4"], "mpillm run: unknown option -n; it is mpirun's: `python -m mpillm mpirun -n 4 run …`"),
        (["-n4", "--mode=auto"], "unknown option -n4; it is mpirun's: `python -m mpillm mpirun -n4 run …`"),
        (["--np=4"], "unknown option --np=4; it is mpirun's: `python -m mpillm mpirun --np=4 run …`"),
        (["--hostfile", "my hosts"], "python -m mpillm mpirun --hostfile 'my hosts' run …"),
    ],
)
def test_an_option_of_mpirun_behind_run(words: list[str], hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(words)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    "words", [("--core_type", "dummy"), ("--core_type", "trtllm_endpoint"), ("--device", "cpu")]
)
def test_a_plan_gives_gpus_to_cores_that_use_them(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    def devices(*more: str) -> list[int | None]:
        assert cli.main(["plan", "--world_size", "3", "--format", "json", *more]) == 0
        return [rank["device"] for rank in json.loads(capsys.readouterr().out)["ranks"]]

    assert devices() == [None, 0, 1]
    assert devices(*words) == [None, None, None]


@pytest.mark.parametrize("n_contexts", [0, 1])
def test_a_plan_of_a_client_is_its_run(
    n_contexts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A YAML's instances are the servers', which a client does not start: its ranks are its own."""
    file = tmp_path / "disagg.yaml"
    sections = f"context_servers: {{num_instances: {n_contexts}}}\ngeneration_servers: {{num_instances: 2}}\n"
    file.write_text(sections)
    client = ["plan", "--core_type", "trtllm_disagg", "--disagg_config", str(file)]
    assert cli.main(client) == 0
    assert "2 ranks on 1 node: 1 control, 1 worker; 1 executor instance" in capsys.readouterr().out
    assert cli.main([*client, "--world_size", "5"]) == 0
    assert "5 ranks on 1 node: 1 control, 4 workers; 4 executor instances" in capsys.readouterr().out


def test_ranks_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown option -n (did you mean '--world_size'?)" in error_of(capsys, "plan", "-n", "4")


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["help", "plan"])
    assert end.value.code == 0 and "usage: python -m mpillm plan" in capsys.readouterr().out
    assert "no command 'rum' (did you mean 'run'?)" in error_of(capsys, "help", "rum")
    assert cli.main(["help"]) == 0 and "usage: python -m mpillm COMMAND" in capsys.readouterr().out


def test_which_model_to_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "fetch-model") == "mpillm: fetch-model: which model? There are: smollm2-135m\n"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": no model there: the folder has no config\.json$"):
        locate(str(tmp_path))


def test_a_model_of_the_hub() -> None:
    with pytest.raises(ConfigError) as error:
        locate("meta-llama/Llama-3.1-8B-Instruct")
    text = str(error.value)
    assert "hf download meta-llama/Llama-3.1-8B-Instruct --local-dir models/Llama-3.1-8B-Instruct" in text
    assert text.endswith("then --model_path models/Llama-3.1-8B-Instruct")
    with pytest.raises(ConfigError, match="no such folder, and no such preset"):
        locate("/models/llama/8b")


def test_a_sharegpt_file(tmp_path: Path) -> None:
    """The command in the message makes a data set of it."""
    file = tmp_path / "ShareGPT_V3 cleaned.json"
    turns = [{"from": "human", "value": "What's up?"}, {"from": "gpt", "value": "Not much."}]
    file.write_text(json.dumps([{"id": "a_0", "conversations": turns}, {"id": "b", "conversations": []}]))
    with pytest.raises(ConfigError, match="is a ShareGPT file, not JSONL"):
        load_dataset(PreprocessedLoader(file), ByteTokenizer())
    with pytest.raises(ConfigError, match="is a ShareGPT file, not JSONL") as error:
        load_dataset(file, ByteTokenizer())
    command = str(error.value).splitlines()[1]
    subprocess.run(command.replace("python3", sys.executable, 1), shell=True, check=True, cwd=tmp_path)
    assert load_dataset(tmp_path / "prompts.jsonl", ByteTokenizer()).texts == {0: "What's up?"}


def test_an_array_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"prompt": "one"}], indent=1))
    with pytest.raises(ConfigError, match="is a JSON array, not JSONL"):
        load_dataset(file, ByteTokenizer())


def test_the_address_that_serve_prints() -> None:
    assert http_urls("http://10.0.0.7:8000/v1") == ("http://10.0.0.7:8000",)
    assert http_urls("localhost:8000/,https://b:443/v1/") == ("localhost:8000", "https://b:443")
    with pytest.raises(ValueError, match="continues after /v1"):
        http_urls("http://localhost:8000/v1/completions")


def test_a_plain_installation_runs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything starts, not in phase load."""
    monkeypatch.setitem(sys.modules, "torch", None)
    config = parse_run(["--model_path", "tiny-llama"])
    with pytest.raises(ConfigError, match=r"the package 'torch' is missing: pip install 'mpillm\[torch\]'$"):
        check_core(config)
    check_core(parse_run(["--core_type", "dummy"]))


def test_a_plain_installation_and_another_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever command imports a package of an extra, wherever."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "mpillm.triton.peft_adapter", raising=False)
    expected = "mpillm: the package 'torch' is missing: pip install 'mpillm[torch]'\n"
    assert error_of(capsys, "hf-lora-convert", "-i", "x", "-o", "y") == expected
