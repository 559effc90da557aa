"""Figures of speculative decoding in a result, and the doubt about a set acceptance length."""

from __future__ import annotations

from typing import Any

import pytest

from mpillm.report.speculation import speculation_figures, speculation_rows
from mpillm.report.validity_checks import doubts

ENGINE = {
    "drafted_tokens": 40,
    "accepted_tokens": 13,
    "verifications": 10,
    "accepted_at_0": 8,
    "accepted_at_1": 5,
    "accepted_at_2": 0,
}
OTHER_NAMES = {"accepted_tokens": "accepted_guesses"}
CLIENT = {f"server_{OTHER_NAMES.get(name, name)}": float(n) for name, n in ENGINE.items()}


@pytest.mark.parametrize(
    "instances", [[ENGINE], [CLIENT], [ENGINE, {}, CLIENT]], ids=["engine", "client", "several"]
)
def test_acceptance_of_engines_and_servers(instances: list[dict[str, Any]]) -> None:
    figures = speculation_figures(instances, 4, None)
    assert figures["acceptance_length"] == 2.3 and figures["acceptance_by_position"] == [0.8, 0.5, 0.0]
    assert figures["verifications"] == 10 * sum(map(bool, instances))
    assert doubts({"speculation": figures}) == []
    each = 3.25 * sum(map(bool, instances))
    assert figures["accepted_tokens_per_request"] == each
    assert speculation_rows({"speculation": figures}) == [
        ("acceptance length", "2.30 tokens per verification"),
        ("  by draft position", "80 %  50 %  0 %"),
        ("  per request", f"{each:,.1f} accepted draft tokens"),
    ]


def test_a_server_without_counts_by_position() -> None:
    """As SGLang, which does not count draft tokens either."""
    client = {"server_accepted_guesses": 13.0, "server_verifications": 10.0}
    assert speculation_figures([client], 0, None) == {
        "verifications": 10,
        "accepted_tokens": 13,
        "acceptance_length": 2.3,
    }


@pytest.mark.parametrize("instances", [[], [{"samples": 3}], [CLIENT]], ids=["none", "no counts", "counts"])
def test_a_set_length_is_doubtful(instances: list[dict[str, Any]]) -> None:
    figures = speculation_figures(instances, 3, 2.5)
    assert figures["set_acceptance_length"] == 2.5
    assert doubts({"speculation": figures}) == [
        "the acceptance of draft tokens is set (--acceptance_length 2.5), not measured: the tokens are not"
        " the model's, and MLPerf does not allow it"
    ]
    rows = speculation_rows({"speculation": figures})
    assert bool(rows) == (instances == [CLIENT])
    assert not rows or rows[0][1] == "2.30 tokens per verification, set to 2.5"


def test_without_draft_tokens_there_are_no_figures() -> None:
    assert speculation_figures([{"samples": 3}, {"drafted_tokens": 0, "verifications": 0}], 3, None) == {}


@pytest.mark.parametrize("damaged", [None, 7, [], {"acceptance_length": None}])
def test_a_file_from_outside(damaged: Any) -> None:
    assert speculation_rows({"speculation": damaged}) == [] and doubts({"speculation": damaged}) == []
