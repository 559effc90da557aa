"""Servers behind https: their certificates are checked, and who does not trust one is told how to."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from mpillm.errors import RunError
from tests.helpers.endpoint_cores import PROMPTS, Rows, core_of, requests
from tests.helpers.scripted_server import ScriptedServer, answer_of

CERTIFICATE = Path(__file__).parents[2] / "data" / "tls" / "self_signed.pem"


def server() -> ScriptedServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return ScriptedServer(tls=context)


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_a_certificate_that_is_trusted(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with server() as secure, core_of(secure.url, f"--scenarios={scenario}") as core:
        assert secure.url.startswith("https://127.0.0.1:")
        core.load()
        core.run_health_check()
        core.start_test()
        core.enqueue(requests())
        rows = Rows(core).until(len(PROMPTS))
    assert {tuple(tokens) for _, _, tokens in rows} >= {tuple(answer_of(prompt, 4)) for prompt in PROMPTS}


def test_a_certificate_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported at once, because waiting does not help."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    words = "its certificate is not trusted: self.signed certificate.*the environment variable SSL_CERT_FILE"
    with server() as secure, core_of(secure.url) as core, pytest.raises(RunError, match=words) as caught:
        core.load()
    assert secure.url in str(caught.value) and not secure.requests


def test_a_certificate_that_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with server() as secure:
        url = secure.url.replace("127.0.0.1", "localhost")
        with core_of(url, "--insecure") as core:
            core.load()
            core.run_health_check()


def test_a_certificate_for_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with server() as secure:
        url = secure.url.replace("127.0.0.1", "localhost")
        with core_of(url) as core, pytest.raises(RunError, match=r"not trusted: .*mismatch"):
            core.load()


def test_a_server_that_speaks_no_tls() -> None:
    with ScriptedServer() as plain:
        url = plain.url.replace("http:", "https:")
        with core_of(url, "--load_deadline=1") as core, pytest.raises(RunError) as caught:
            core.load()
    assert url in str(caught.value) and "Operation not permitted" not in str(caught.value)
