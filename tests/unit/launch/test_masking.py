"""Secrets in command lines and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import masking
from launch.command import Command
from launch.masking import MASK, holds_secret, masked, masked_args, masked_value, without_known
from launch.mpirun import main as mpirun
from launch.owned_server import OwnedServer
from launch.safe_text import printable
from mpillm.files import write_json
from mpillm.options.options import parse_run
from tests.helpers.support import wait_until

KEY = "sk-Zq81-abcdef"


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())


@pytest.mark.parametrize(
    "name",
    [
        *("--api-key", "--api_key", "--apiKey", "OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        *("--token", "--admin-api-key", "--ssl-keyfile-password", "AWS_SECRET_ACCESS_KEY", "Authorization"),
        *("internal_request_auth_key", "DB_PASSWORD", "--hf-token", "MPILLM_KV_SECRET"),
        *("MASTER_KEY", "AZURE_OPENAI_KEY", "--signing-key", "Ocp-Apim-Subscription-Key", "--jwt"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert holds_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--max-tokens", "--tokenizer", "--pad-token", "--skip-tokenizer-init", "--stop_token", "--key"),
        *("--max_new_token", "tokens", "--ssl-keyfile", "TOKENIZERS_PARALLELISM", "--keys", ""),
        *("--ssl-key", "--kv-head-num", "prompt_cache_key", "--num-keys", "Idempotency-Key", "PUBLIC_KEY"),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not holds_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        "--api-key {} --port 1",
        "--api-key={} --port 1",
        "--api-key a {} --port 1",
        "--api-key '{}' --port 1",
        "OPENAI_API_KEY={} vllm",
        '{{"api_key": "{}", "n": 1}}',
        "api_key=['{}']",
        "{{'HF_TOKEN': '{}'}}",
        "--header 'Authorization: Bearer {}'",
        "--header Authorization={}",
        "http://user:{}@host:1/v1",
        *("Authorization: bearer {}", "Authorization: TOKEN {}", "Authorization: Custom-Scheme {}"),
        *("api-key: bearer {}", "Authorization: {} --port 1", "Authorization: Bearer -{}"),
        *("--api-key=-{} --port 1", "export API_KEY=-{}", "X-API-Key: -{}", "API_KEY=Basic{}"),
        *("--api-key=a,{}", "--api-key=a,-{}", "api_keys=['a', '{}']", '{{"api_keys": ["a", "{}"]}}'),
        *("['v', '--api-key', '{}', '--port']", '["--api-key", "a", "{}"]', '{{"--api-key": "{}"}}'),
        *("--api-key '{}", f"{'A' * 120}_KEY={{}}"),
    ],
)
def test_secrets_in_texts(text: str) -> None:
    made = masked(text.format(KEY))
    assert KEY not in made and MASK in made
    assert masked(made) == made


@pytest.mark.parametrize(
    "text",
    ["--api-key={}", "api_key: {}", "Authorization: Bearer {}", "--api-key '{}'", "http://{}@h:1/v1"],
)
def test_long_secrets(text: str) -> None:
    assert masked(text.format("eyJ" * 1000)) == text.format(MASK)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"api_key": "%s", "n": 1}', '{"api_key": "(secret)", "n": 1}'),
        ("{'api_key': '%s', 'the n': 1}", "{'api_key': '(secret)', 'the n': 1}"),
        ("{api_key: %s,n: 1}", "{api_key: (secret),n: 1}"),
        ("API_KEY=%s,PORT=1", "API_KEY=(secret),PORT=1"),
        ("API_KEY=%s vllm serve", "API_KEY=(secret) vllm serve"),
        ("API_KEY= --port 1 # %s", "API_KEY= --port 1 # %s"),
        ("-H 'Authorization: Token %s' http://h:1", "-H 'Authorization: Token (secret)' http://h:1"),
        ("['--api-key', '%s', '--port']", "['--api-key', '(secret)', '--port']"),
    ],
)
def test_the_text_around_a_secret_stays(text: str, shown: str) -> None:
    assert masked(text.replace("%s", KEY)) == shown.replace("%s", KEY)


def test_the_key_of_a_header_is_known_without_its_scheme() -> None:
    masked_value({"Authorization": f"Bearer {KEY}"})
    assert without_known(f"wrong key {KEY}") == f"wrong key {MASK}"


@pytest.mark.parametrize("text", ["--port 1 --max-tokens 5", "Qwen/Qwen3-0.6B", "http://h:1/v1", "a: b", ""])
def test_other_texts_stay(text: str) -> None:
    assert masked(text) == text and masked_value(text) == text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["v", "--api-key", KEY, "b", "--port", "1"], ["v", "--api-key", MASK, MASK, "--port", "1"]),
        (["v", f"--api-key={KEY}", "m"], ["v", f"--api-key={MASK}", "m"]),
        (["v", "--api-key", KEY, "{model}"], ["v", "--api-key", MASK, "{model}"]),
        (["--server_args", f"--api-key {KEY}"], ["--server_args", f"--api-key {MASK}"]),
        (["--server_args=--api-key " + KEY], [f"--server_args=--api-key {MASK}"]),
        (["-e", f"HF_TOKEN={KEY}"], ["-e", f"HF_TOKEN={MASK}"]),
    ],
)
def test_secrets_in_command_lines(words: list[str], expected: list[str]) -> None:
    assert masked_args(words) == expected


def test_a_secret_that_is_known_is_masked_in_any_text(tmp_path: Path) -> None:
    masked_args(["--api-key", KEY])
    assert without_known(f"wrong key {KEY}!") == printable(f"wrong key {KEY}!") == f"wrong key {MASK}!"
    write_json(tmp_path / "result.json", {"cause": f"it says {KEY}"})
    assert KEY not in (tmp_path / "result.json").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--server", "vllm", "--server_args", f"--api-key {KEY}"],
        ["--server", f"command:python s.py --port {{port}} --api-key {KEY}"],
        ["--harness", "aiperf", "--harness_args", f"--api-key {KEY}"],
        ["--harness", f"command:load {{url}} {{report}} --token={KEY}"],
    ],
)
def test_options_are_written_and_named_without_secrets(words: list[str]) -> None:
    config = parse_run(["--model_path", "m", *words])
    name = words[-2].removeprefix("--")
    assert KEY in str(config.values[name])
    for output in (
        config.to_json()[name],
        config.named(name),
        config.difference(config.values | {name: "x"}),
    ):
        assert KEY not in str(output) and MASK in str(output)


def test_a_command_is_printed_without_secrets() -> None:
    command = Command(("vllm", "--api-key", KEY), {"HF_TOKEN": KEY})
    assert KEY not in str(command) and str(command).count(MASK) == 2


def test_the_line_of_mpirun_is_printed_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    words: list[Any] = ["--dry_run", "-n", "2", "run", "--server_args", f"--api-key {KEY}"]
    assert mpirun(words, ["run"]) == 0
    out, err = capsys.readouterr()
    assert KEY not in out + err and MASK in out and "fill it in" in err


def test_what_a_server_prints_of_its_key_is_overwritten(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    script = "echo \"args: {'api_key': ['$2']}\"; echo started; exec sleep 600"
    command = Command(("sh", "-c", script, "sh", "--api-key", KEY))
    server = OwnedServer(command, log)
    try:
        wait_until(lambda: b"started\n" in log.read_bytes(), "its line")
    finally:
        server.stop(0.1)
    text = log.read_text()
    assert KEY not in text and f"['{'*' * len(KEY)}']" in text and text.endswith("started\n")
