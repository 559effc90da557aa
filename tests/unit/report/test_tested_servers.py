"""Counts of servers that a load client used itself: others that used them are reported."""

from __future__ import annotations

from typing import Any

import pytest

from mpillm.report.validity_checks import doubts, failed_checks, server_checks, unchecked


def result_of(max_tokens: int | None, *counted: float | None) -> dict[str, Any]:
    """Return a result; `counted`: the tokens of each server, by its own count."""
    servers = [
        {"url": f"http://s:{i}", "counted": {} if n is None else {"generated_tokens": n}}
        for i, n in enumerate(counted)
    ]
    client = {"name": "guidellm", "max_server_tokens": max_tokens}
    return {"harness": client, "per_instance": [{"samples": 0, "short_answers": 0, "servers": servers}]}


@pytest.mark.parametrize("counted", [(96.0,), (50.0, 46.0), (90.0,)])
def test_the_client_alone(counted: tuple[float, ...]) -> None:
    assert server_checks(result_of(96, *counted))["server_totals"] == ""


def test_others_use_the_servers() -> None:
    result = result_of(96, 60.0, 60.0)
    text = (
        "servers count 24 tokens more than guidellm requested: others used them"
        " (http://s:0: 60, http://s:1: 60)"
    )
    assert doubts(result, others_serve=True) == [text]
    assert failed_checks(result | {"server_checks": server_checks(result)}) == []


@pytest.mark.parametrize("result", [result_of(None, 60.0), result_of(96, 60.0, None), result_of(96)])
def test_totals_that_cannot_be_compared(result: dict[str, Any]) -> None:
    checks = server_checks(result)
    assert checks["server_totals"] is None
    assert any(
        "whether others used the servers" in text for text in unchecked(result | {"server_checks": checks})
    )
