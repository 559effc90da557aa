"""Conversations at servers: the header with their name, and the server that gets all of their requests."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest

from disagg.errors import ConfigError
from mpillm.errors import RunError
from tests.helpers.endpoint_cores import Rows, core_of, requests, started
from tests.helpers.scripted_server import MODEL, Reply, Request, ScriptedServer, good, plain


def test_a_conversation_has_its_name_in_a_header_and_stays_at_its_server() -> None:
    sessions = [0, 5, 6, 0x_FFFF_FFFF]
    with (
        ScriptedServer() as one,
        ScriptedServer() as two,
        core_of(f"{one.address},{two.address}") as core,
    ):
        core.load()
        for _ in range(3):
            core.enqueue(requests(session=sessions))
            Rows(core).until(4)
    seen = defaultdict[str | None, set[str]](set)
    for server in (one, two):
        for request in server.requests:
            if request.path == "/v1/completions":
                seen[request.headers.get("x-session-id")].add(server.address)
    names = {"00000005", "00000006", "ffffffff"}
    assert seen.keys() == {None, *names}
    assert all(len(seen[name]) == 1 for name in names)
    assert len(set.union(*(seen[name] for name in names))) == 2


def test_fields_and_headers_of_the_user() -> None:
    options = ('--extra_body={"priority": 3}', '--extra_headers={"X-Tenant": "a b"}')
    with ScriptedServer() as server, core_of(server.address, *options) as core:
        core.load()
        core.enqueue(requests())
        Rows(core).until(4)
    sent = [request for request in server.requests if request.path == "/v1/completions"]
    assert {request.headers.get("x-tenant") for request in sent} == {"a b"}
    assert [json.loads(request.body).get("priority") for request in sent[-4:]] == [3] * 4


def test_the_name_of_the_header_of_a_conversation() -> None:
    with ScriptedServer() as server, core_of(server.address, "--session_header=X-Chat") as core:
        core.load()
        core.enqueue(requests(session=5))
        Rows(core).until(4)
    sent = [request.headers for request in server.requests if request.path == "/v1/completions"]
    assert {one.get("x-chat") for one in sent[-4:]} == {"00000005"}
    assert not any("x-session-id" in one for one in sent)


def _with_models(*names: str) -> ScriptedServer:
    def models(_: Request) -> Reply:
        return plain({"data": [{"id": name} for name in names]})

    return ScriptedServer(others={"/v1/models": models})


def _models(server: ScriptedServer) -> list[str]:
    return [body["model"] for body in server.bodies()]


def test_requests_take_turns_with_adapters() -> None:
    options = "--lora_modules=base,a,b"
    with _with_models("base", "a", "b") as server, started(server, options) as core:
        assert _models(server) == ["base", "a", "b"]  # each answers before the test
        core.enqueue(requests([[1 + i] for i in range(6)]))
        Rows(core).until(6)
        (record,) = core.statistics()["servers"]
    assert Counter(_models(server)[3:]) == {"base": 2, "a": 2, "b": 2}
    assert record["answers_by_model"] == {"base": 2, "a": 2, "b": 2}
    assert not record["other_models"]


def test_a_conversation_keeps_its_adapter() -> None:
    with _with_models("a", "b") as server, started(server, "--lora_modules=a,b") as core:
        for _ in range(3):
            core.enqueue(requests(session=[1, 2, 3, 4]))
            Rows(core).until(4)
    seen = defaultdict[str, set[str]](set)
    for request in server.requests:
        if "x-session-id" in request.headers:
            seen[request.headers["x-session-id"]].add(request.json["model"])
    assert [seen[f"{session:08x}"] for session in (1, 2, 3, 4)] == [{"b"}, {"a"}, {"b"}, {"a"}]


def test_an_adapter_that_the_server_lacks() -> None:
    with (
        _with_models("a", "b") as server,
        pytest.raises(RunError, match="it has no model c; it has a, b"),
        started(server, "--lora_modules=a,c"),
    ):
        pass


def test_adapters_and_another_name_of_the_model() -> None:
    with (
        ScriptedServer() as server,
        pytest.raises(ConfigError, match="--lora_modules exclude each other"),
        core_of(server.address, "--lora_modules=a", core_options={"model": MODEL}),
    ):
        pass


def test_another_path_of_requests() -> None:
    path = "/openai/text?version=1"
    with (
        ScriptedServer(others={path: good}) as server,
        started(server, f"--endpoint_path={path}") as core,
    ):
        core.enqueue(requests())
        Rows(core).until(4)
    assert not server.bodies() and [one.path for one in server.requests].count(path) == 5


def test_a_path_that_the_server_lacks_is_in_the_message() -> None:
    with (
        ScriptedServer() as server,
        pytest.raises(RunError, match=f"{server.address}/other: HTTP 404"),
        started(server, "--endpoint_path=/other"),
    ):
        pass
