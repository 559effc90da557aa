"""Conversations at servers: the header with their name, and the server that gets all of their requests."""

from __future__ import annotations

import json
from collections import defaultdict

from tests.helpers.endpoint_cores import Rows, core_of, requests
from tests.helpers.scripted_server import ScriptedServer


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
