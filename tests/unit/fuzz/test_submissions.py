"""Runs that are laid out as a submission, or verified: what they hold is read, or refused by name."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.submission import compliance_tests, score_run
from mpillm.submission.commands import compliance, submission
from mpillm.submission.scores import Scores
from mpillm.workloads import WORKLOADS
from tests.helpers.fuzzing import changed, damaged, fuzz, json_bytes, new_folder
from tests.helpers.run_directories import FULL_SIZE, log_entry, make_client_run, make_run

ANSWERS = [log_entry(i, [5, *range(10, 30), 2]) for i in range(4)]
KINDS = ["performance", "accuracy", "TEST06", "client"]


@cache
def whole() -> Path:
    """Return a folder with a run of each kind; they stay as they are."""
    path = new_folder()
    for kind in KINDS[:3]:
        make_run(path / kind, kind, answers=ANSWERS if kind != "performance" else (), detail=FULL_SIZE)
    (path / "accuracy" / "accuracy.txt").write_text(
        "{'rouge1': 44.4, 'rouge2': 22.1, 'rougeL': 28.6}\n\nhash=ab\n"
    )
    make_client_run(path / "client")
    return path


def files_of(kind: str) -> list[str]:
    run = whole() / kind
    return sorted(str(file.relative_to(run)) for file in run.rglob("*.*") if file.is_file())


def of_file(kind: str, name: str) -> st.SearchStrategy[tuple[str, str, bytes]]:
    data = (whole() / kind / name).read_bytes()
    made = damaged([data], most=2)
    if name.endswith(".json"):
        made = changed([json.loads(data)]).map(json_bytes) | made
    elif name.endswith(".txt"):
        lines = [b":::MLLOG ", b'"value": ', b"NaN", b"1e999", b"null", b"hash=", b"TEST PASSED\n"]
        made = damaged([data], lines, most=3)
    return made.map(lambda changed_to: (kind, name, changed_to))


DAMAGED = st.deferred(
    lambda: st.sampled_from(KINDS).flatmap(
        lambda kind: st.sampled_from(files_of(kind)).flatmap(lambda name: of_file(kind, name))
    )
)


@pytest.mark.long
@fuzz(DAMAGED, refused_by=ConfigError, examples=100)
def test_submission(folder: Path, drawn: tuple[str, str, bytes]) -> None:
    kind, name, data = drawn
    runs = folder / "runs"
    if not runs.exists():
        shutil.copytree(whole(), runs)
    for one in KINDS:
        for file in files_of(one):
            (runs / one / file).write_bytes((whole() / one / file).read_bytes())
    (runs / kind / name).write_bytes(data)
    words = ["--output", str(folder / "out"), "--submitter", "Us", "--system_name", "Box", "--force"]
    mine: list[Any] = [runs / "client"] if kind == "client" else [runs / one for one in KINDS[:3]]
    with contextlib.redirect_stdout(io.StringIO()):
        submission.main([*map(str, mine), *words])


@fuzz(
    DAMAGED.filter(lambda drawn: drawn[0] == "TEST06"),
    refused_by=ConfigError,
    examples=60,
)
def test_compliance(folder: Path, drawn: tuple[str, str, bytes]) -> None:
    _, name, data = drawn
    path = folder / "TEST06"
    if not path.exists():
        shutil.copytree(whole() / "TEST06", path)
    for file in files_of("TEST06"):
        (path / file).write_bytes((whole() / "TEST06" / file).read_bytes())
    (path / name).write_bytes(data)
    with contextlib.redirect_stdout(io.StringIO()):
        compliance.main([str(path)])


COMPLETIONS = [{"lang": "python", "entry_point": "f"}, {"lang": "cpp", "entry_point": "g"}]
PASSED = {"python_f": {"passed": True}, "cpp_g": {"passed": False}}
PRINTED = b"{'exact_match': 81.36, 'tokens_per_sample': 3886.2, 'num-samples': 2}\nrouge1: '44.4'\n"


@fuzz(
    changed([PASSED]).map(json_bytes) | damaged([json_bytes(PASSED)]),
    damaged([PRINTED], [b"'exact_match': ", b"NaN", b"1e999", b"9" * 400, b"'", b"\xff"]),
    st.sampled_from(["mbxp", "evaluated", "TEST07"]),
    refused_by=ConfigError,
    found=[(b"{}", b"'exact_match':" + b"9" * 400, which) for which in ("evaluated", "TEST07")],
)
def test_what_other_programs_score(folder: Path, passed: bytes, printed: bytes, which: str) -> None:
    """The files that `accuracy` and `compliance` take beside a run."""
    (file := folder / "scored").write_bytes(passed if which == "mbxp" else printed)
    if which == "TEST07":
        assert json.loads(json.dumps(compliance_tests._test07([], file).passed)) in (True, False)
        return
    run: Any = SimpleNamespace(path=folder, workload=WORKLOADS["deepseek-r1"])
    given = Scores({"gen_num": 2.0, "tokens_per_sample": 3886.2}, [], COMPLETIONS)
    score = score_run._with_mbxp if which == "mbxp" else score_run._with_evaluation
    json.dumps(score(run, given, str(file)).values, allow_nan=False)
