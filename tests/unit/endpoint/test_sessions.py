"""The conversation that a request names: in its header or its body."""

from __future__ import annotations

import pytest

from mpillm.endpoint.api_error import ApiError, Json
from mpillm.endpoint.sessions import session_of


def test_a_name_is_the_same_number_wherever_it_is() -> None:
    number = session_of({"X-Session-ID": "a"}, {})
    assert number > 0 and number != session_of({"X-Session-ID": "b"}, {})
    bodies: list[Json] = [
        {"session_id": "a"},
        {"user": "a"},
        {"disaggregated_params": {"conversation_id": "a"}},
        {"session_id": "a", "user": "b"},
    ]
    assert {session_of({}, body) for body in bodies} == {number}
    assert session_of({"X-Session-ID": "a"}, {"session_id": "b"}) == number
    assert session_of({"X-Session-Affinity": "a"}, {"user": "b"}) == number  # AIPerf's
    assert session_of({"X-Session-Affinity": "b", "X-Session-ID": "a"}, {}) == number
    assert session_of({}, {}) == session_of({}, {"user": None, "session_id": ""}) == 0


@pytest.mark.parametrize("body", [{"session_id": 5}, {"user": ["a"]}, {"user": "\ud800"}])
def test_a_name_must_be_a_string(body: Json) -> None:
    with pytest.raises(ApiError, match=r"session_id|user"):
        session_of({}, body)
