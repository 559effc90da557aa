"""Every lie of a server that the checks of a test name, told by a server that is otherwise honest."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mpillm.comms.messages import RequestFlag
from mpillm.errors import RunError
from mpillm.programs.servers.kind import server_log
from mpillm.report.validity_checks import doubts, failed_checks, server_checks
from tests.helpers.endpoint_cores import failure, requests
from tests.helpers.lying_server import HONEST, OTHER_MODEL, Answer, Lie, core_of_liars, result_of
from tests.helpers.scripted_server import MODEL, Request

RULES = {"speculation_forbidden": True}
URL = r"http://127\.0\.0\.1:\d+"


def judged(result: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what refuses a test, and what only makes it doubtful."""
    result["server_checks"] = server_checks(result, **RULES)
    refusals = failed_checks(result)
    return refusals, [text for text in doubts(result, others_serve=True, **RULES) if text not in refusals]


def changed(**by: Any) -> Lie:
    """Return the lie of an answer with other values at its top."""
    return Lie(answer=lambda answer, _: answer | by)


def usage(**by: Any) -> Lie:
    return Lie(answer=lambda answer, _: answer | {"usage": answer["usage"] | by})


def in_choice(**by: Any) -> Lie:
    return Lie(answer=lambda answer, _: answer | {"choices": [answer["choices"][0] | by]})


@pytest.mark.parametrize("roles", [("",), ("owned",), ("context", "generation")])
@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_an_honest_server_is_not_doubted(roles: tuple[str, ...], scenario: str) -> None:
    with core_of_liars(dict.fromkeys(roles, HONEST), f"--scenarios={scenario}") as (core, _):
        result = result_of(core)
    checks = server_checks(result, **RULES)
    unknown = {name for name, found in checks.items() if found is None}
    assert judged(result) == ([], []) and set(checks.values()) <= {"", None}
    assert unknown == (set() if "context" in roles else {"contexts_arrived"})


REFUSED = {
    "prompts of a prefix cache": (Lie(counts={"cached": 5}), r"^20 prompt tokens came from a .* \({}: 20\)"),
    "guessed tokens": (Lie(counts={"guessed": 2}), r"^servers accepted 8 draft tokens.*\({}: 8\)"),
    "the prompts' usage": (usage(prompt_tokens=7), r"tokens .* in the prompts of 4 requests \({}: 4\)"),
    "the answers' usage": (usage(completion_tokens=9), r"tokens .* in the answers of 4 requests \({}: 4\)"),
    "min_tokens": (Lie(tokens=lambda tokens, _: tokens[:2], reason="stop"), r"^4 answers .* \({}: 4\)"),
    "a lower limit": (Lie(tokens=lambda tokens, _: tokens[:3]), r"^4 answers ended with .*\({}: 4\)"),
    "expired leases": (Lie(counts={"expired": 1}), r"leases .* expired.*{}: 4 expired, 0 read after"),
    "late reads": (Lie(counts={"late": 2}), r"\({}: 0 expired, 8 read after that\): raise kv_lease_duration"),
    "failed transfers": (Lie(counts={"failed": 1}), r"^4 transfers of KV caches failed.*\({}: 4\)"),
}


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
@pytest.mark.parametrize("lie", REFUSED)
def test_a_lie_that_refuses_the_test(lie: str, scenario: str) -> None:
    least = {"min_output": 3} if lie == "min_tokens" else {}
    with core_of_liars({"": REFUSED[lie][0]}, f"--scenarios={scenario}") as (core, urls):
        (refusal,), others = judged(result_of(core, **least))
    assert re.search(REFUSED[lie][1].replace("{}", re.escape(urls[""])), refusal) and others == []


def test_ignore_eos_that_is_ignored() -> None:
    lie = Lie(tokens=lambda tokens, _: tokens[:3], reason="stop")
    with core_of_liars({"": lie}) as (core, _):
        (refusal,), _ = judged(result_of(core, flags=int(RequestFlag.IGNORE_END)))
    assert refusal.startswith("4 answers had fewer tokens than")


DOUBTED = {
    "more tokens in all": (Lie(counts={"generated": 20}), "counts 80 tokens more than arrived here: others"),
    "more prompts in all": (
        Lie(counts={"prompt": 3}),
        "counts 12 prompt tokens more than were sent here: oth",
    ),
    "fewer tokens in all": (
        Lie(counts={"generated": -1}),
        "counts 12 tokens, fewer than the 16 of its answe",
    ),
    "fewer prompts in all": (Lie(counts={"prompt": -1}), "counts 52 prompt tokens, fewer than the 56 of its"),
    "the model of answers": (
        changed(model=OTHER_MODEL),
        f"named the model {OTHER_MODEL} in 4 of its answers",
    ),
}


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
@pytest.mark.parametrize("lie", DOUBTED)
def test_a_lie_that_makes_a_test_doubtful(lie: str, scenario: str) -> None:
    with core_of_liars({"": DOUBTED[lie][0]}, f"--scenarios={scenario}") as (core, urls):
        refusals, (doubt,) = judged(result_of(core))
    assert refusals == [] and doubt.startswith(f"{urls['']} {DOUBTED[lie][1]}"), doubt


def test_the_only_model_of_other_peoples_server_is_named() -> None:
    with core_of_liars({"": Lie(models=(OTHER_MODEL,))}, "--model_path=mine") as (core, urls):
        (client,) = result_of(core)["per_instance"]
    assert [(one["url"], one["model"]) for one in client["servers"]] == [(urls[""], OTHER_MODEL)]


def test_an_owned_server_that_lists_another_model() -> None:
    lies = {"owned": Lie(models=(OTHER_MODEL,))}
    with core_of_liars(lies) as (core, urls), pytest.raises(RunError) as caught:
        core.run_health_check()
    assert caught.value.failures[0].cause.startswith(
        f"{urls['owned']}/v1/models lists {OTHER_MODEL}, not {MODEL}, which the run started"
    )


@pytest.mark.parametrize("liar", ["owned", "context", "generation"])
def test_an_owned_server_that_answers_with_another_model(liar: str) -> None:
    roles = ("owned",) if liar == "owned" else ("context", "generation")
    lies = {role: changed(model=OTHER_MODEL) if role == liar else HONEST for role in roles}
    with core_of_liars(lies) as (core, urls):
        core.run_health_check()
        core.start_test()
        core.enqueue(requests())
        assert failure(core).startswith(
            f"{urls[liar]}/v1/completions: it answers with the model {OTHER_MODEL}"
        )


def test_a_revision_behind_the_name_is_no_other_model() -> None:
    with core_of_liars({"": changed(model=f"{MODEL}@main")}) as (core, _):
        assert judged(result_of(core)) == ([], [])


TRANSFERS = ("transfers", "failed", "expired", "late")  # which NIXL counts
KV = {
    "fewer transfers": (
        {"generation": Lie(counts={"transfers": -1})},
        r"generation server {} counts 0 transfers of KV caches for 4 requests with one",
    ),
    "no KV cache arrives": (
        {"generation": Lie(counts={"received": -13, "computed": 13}, hidden=TRANSFERS)},
        r"generation server {} computed 56 prompt tokens of 4 requests, and received 0 in KV caches",
    ),
    "no KV cache arrives, and its transfers are those of others": (
        {"generation": Lie(counts={"received": -13, "computed": 13})},
        r"generation server {} computed 56 prompt tokens of 4 requests",
    ),
    "no count of transfers": (
        {"generation": Lie(hidden=(*TRANSFERS, "received", "computed"))},
        r"generation server {} gives no count of KV cache transfers \(/metrics\)",
    ),
    "no metrics": (
        {"generation": Lie(metrics=False)},
        r"generation server {} gives no count of KV cache transfers \(/metrics\)",
    ),
    "expired leases": (
        {"context": Lie(counts={"expired": 1, "late": 1})},
        r"context server {}: 4 expired, 4 read after that",
    ),
    "failed transfers": ({"generation": Lie(counts={"failed": 2})}, r"generation server {}: 8"),
    "a prefix cache of a context server": ({"context": Lie(counts={"cached": 8})}, r"context server {}: 32"),
}


@pytest.mark.parametrize("lie", KV)
def test_a_lie_in_disaggregated_serving(lie: str) -> None:
    lies, text = KV[lie]
    (liar,) = lies
    with core_of_liars({"context": HONEST, "generation": HONEST, **lies}) as (core, urls):
        (refusal,), others = judged(result_of(core))
    assert re.search(text.replace("{}", re.escape(urls[liar])), refusal) and others == [], refusal


def without_end(answer: Answer, _: Request) -> Answer:
    return answer | {"choices": [answer["choices"][0] | {"finish_reason": None}]}


FAILS = {
    "no finish_reason": (Lie(answer=without_end), "it ended its answer in the middle: no finish_reason"),
    "an answer that was given up": (Lie(reason="abort"), "it gave up the answer: finish_reason abort"),
    "a finish_reason that is no text": (in_choice(finish_reason=1), "finish_reason is a string"),
    "more than max_tokens": (Lie(tokens=lambda t, _: [*t, 5]), "it sent more than the 4 requested tokens"),
    "a second choice": (in_choice(index=1), "one choice was requested"),
    "a chat": (in_choice(text="", token_ids=None, message={}), "it answers as a chat"),
    "no token": (Lie(tokens=lambda *_: [], reason="stop"), "it answered without a token"),
    "an error with status 200": (changed(error={"message": "no", "code": 500}), "it sent an error: no"),
    "tokens that are none": (in_choice(token_ids=[-1]), "token ids are whole numbers"),
    "text in place of tokens": (in_choice(token_ids=None), "it answered without a token"),
    "usage that is no number": (usage(completion_tokens="4"), "usage has whole numbers"),
    "no JSON": (Lie(answer=lambda *_: b"not JSON"), "it sent something that is not JSON"),
    "another coding": (Lie(headers={"Content_Encoding": "gzip"}), "it sent a body in Content-Encoding gzip"),
    "a body that ends early": (Lie(cut=True), "it closed the connection in the middle"),
}


@pytest.mark.parametrize("lie", FAILS)
def test_an_answer_that_makes_no_sense(lie: str) -> None:
    with core_of_liars({"": FAILS[lie][0]}) as (core, urls):
        core.run_health_check()
        core.start_test()
        core.enqueue(requests())
        message = failure(core)
    assert message.startswith(f"{urls['']}/v1/completions: ") and FAILS[lie][1] in message, message


def test_every_answer_twice() -> None:
    """The second one is nobody's."""
    with core_of_liars({"": Lie(again=True)}) as (core, _):
        assert judged(result_of(core)) == ([], [])


def test_a_server_that_counts_nothing_is_not_known() -> None:
    with core_of_liars({"": Lie(metrics=False)}) as (core, _):
        result = result_of(core)
    checks = server_checks(result, **RULES)
    assert judged(result) == ([], [])
    assert (checks["no_cached_prompts"], checks["no_guesses"], checks["server_totals"]) == (None, None, None)


@pytest.mark.parametrize("liar", ["owned", "context", "generation"])
def test_the_log_of_an_owned_server_is_quoted(liar: str, tmp_path: Path) -> None:
    """vLLM answers 500 and no cause when a NIXL handshake times out: its log has it."""
    roles = ("owned",) if liar == "owned" else ("context", "generation")
    fails = Lie(
        status="500 Internal Server Error", answer=lambda *_: {"error": {"message": "Internal error"}}
    )
    index = 1 if liar == "context" else 0
    (tmp_path / f"server_{index}.log").write_text(
        "INFO ready\nERROR NIXL transfer failure: handshake_failed\n"
    )
    (tmp_path / f"server_{1 - index}.log").write_text("ERROR of another server\n")
    with core_of_liars({role: fails if role == liar else HONEST for role in roles}) as (core, urls):
        core.server_log = partial(server_log, tmp_path)
        core.run_health_check()
        core.start_test()
        core.enqueue(requests())
        first, where, *lines = failure(core).splitlines()
    assert first == f"{urls[liar]}/v1/completions: HTTP 500: Internal error"
    assert where == f"failures in {tmp_path}/server_{index}.log, the first ones:"
    assert lines == ["  | ERROR NIXL transfer failure: handshake_failed"]
