"""Runs and options that make no submission are refused, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.helpers.full_disk import files_of_at_most
from tests.helpers.run_directories import MACHINE, make_run
from tests.helpers.submissions import Maker


def test_existing_output(maker: Maker) -> None:
    runs = maker.runs()
    maker.submit(*runs, code=4)
    mark = maker.tree / "mark"
    mark.touch()
    assert f"{maker.tree} exists: choose another --output, or --force to replace it" in maker.submit(
        *runs, code=2
    )
    assert mark.exists()
    maker.submit(*runs, "--force", code=4)
    assert not mark.exists()
    assert [path.name for path in maker.tree.parent.iterdir()] == ["Us"], "nothing is left beside it"


def test_a_submission_that_can_not_be_written_leaves_what_was_there(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = maker.runs()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with files_of_at_most(0):
        assert "File too large" in maker.submit(*runs, code=2)
    assert not (maker.folder / "out").exists()
    maker.submit(*runs, code=4)
    (maker.tree / "mark").touch()
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name == "tree":
            full()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    assert "No space left on device" in maker.submit(*runs, "--force", code=2)
    assert (maker.tree / "mark").exists()
    assert [path.name for path in maker.tree.parent.iterdir()] == ["Us"]


def test_bad_input(maker: Maker) -> None:
    performance, accuracy, _ = maker.runs()

    def check_error(expected: str, *words: object) -> None:
        assert expected in maker.submit(*words, code=2)
        assert not (maker.folder / "out").exists()

    check_error("no such run directory", maker.folder / "none")
    check_error("is given twice", performance, performance)
    check_error(
        "--division clsed: not one of closed, open (did you mean 'closed'?)",
        performance,
        "--division",
        "clsed",
    )
    check_error("must be a folder name", performance, "--submitter", "../us")
    check_error("--submitter '': expected a text that is not empty", performance, "--submitter", "")
    check_error("unknown option --devision (did you mean '--division'?)", performance, "--devision", "open")
    check_error(
        "aiperf made its load (--harness): there is no verdict of LoadGen",
        make_run(maker.folder / "h", result={"status": "MEASURED", "harness": {"name": "aiperf"}}),
    )
    check_error(
        "failed in phase 'test': x",
        make_run(
            maker.folder / "f", result={"status": "FAILED", "phase": "test", "failures": [{"cause": "x"}]}
        ),
    )
    check_error("start one with --benchmarks", make_run(maker.folder / "any", benchmarks=None))
    check_error("there is no workload resnet50", make_run(maker.folder / "other", benchmarks=["resnet50"]))
    check_error(
        "are both the performance run of llama2-70b-99.9 Offline",
        performance,
        make_run(maker.folder / "second"),
    )
    check_error(
        "--dtype is 'bfloat16' and 'float32'",
        performance,
        make_run(maker.folder / "fp32", "accuracy", dtype="float32"),
    )
    check_error(
        "--quantization is None and 'int8'",
        performance,
        make_run(maker.folder / "int8", "accuracy", quantization="int8"),
    )
    elsewhere = {**MACHINE, "memory_bytes": 256 << 30}
    check_error(
        "not made on the same system: memory_bytes",
        performance,
        make_run(maker.folder / "else", "accuracy", machine=elsewhere),
    )
    newer = {**MACHINE, "software": {**MACHINE["software"], "mlcommons-loadgen": "6.0.18"}}  # type: ignore[dict-item]
    check_error(
        "system: software: mlcommons-loadgen 6.0.17 and 6.0.18",
        performance,
        make_run(maker.folder / "new", "accuracy", machine=newer),
    )
    check_error(
        "not made on the same system: workers 2 and 3",
        performance,
        make_run(maker.folder / "more", "accuracy", workers=3),
    )
    audit = make_run(maker.folder / "audit", audit_conf="own.config")
    check_error("with an audit.config of none of TEST06, TEST07, TEST09", audit)
    check_error(
        "there is no Offline of it", make_run(maker.folder / "inter", benchmarks=["llama2-70b-interactive"])
    )
    for name in ("mlperf_log_detail.txt", "machines.json", "plan.json"):
        (broken := make_run(maker.folder / f"no-{name}") / name).unlink()
        check_error(name, broken.parent)
    garbled = make_run(maker.folder / "garbled")
    (garbled / "machines.json").write_text("{")
    check_error("machines.json:1: not valid JSON", garbled)
    beside = make_run(maker.folder / "beside", "accuracy")
    for i, (name, text) in enumerate(
        (
            *(
                ("machines.json", "{}"),
                ("machines.json", '{"n0": {}}'),
                ("plan.json", "[]"),
                ("plan.json", '{"ranks": []}'),
            ),
            *(("ranks.json", "[]"), ("result.json", "[]"), ("config.json", "{}")),
            ("result.json", '{"status": "VALID", "test_mode": "PerformanceOnly"}'),  # no scenario
        )
    ):
        (other := make_run(maker.folder / f"other-{i}") / name).write_text(text)
        check_error(f"{name}: damaged, or not written by a run", other.parent, beside)

    file = maker.folder / "given.json"
    for text, expected in (
        ("{", "not valid JSON"),
        ("[]", f"{file}: not a JSON object"),
        ('{"coling": "air"}', f"--system_description {file}: no field 'coling' (did you mean 'cooling'?)"),
        ('{"cooling": ""}', "cooling is empty"),
        ('{"status": "soon"}', "status 'soon': not one of available, preview, rdi"),
        ('{"submitter": "Them"}', "submitter is 'Them', but --submitter Us"),
    ):
        file.write_text(text)
        check_error(expected, performance, "--system_description", file)
    check_error("no such file", performance, "--measurements", maker.folder / "none.json")
    with (accuracy / "mlperf_log_accuracy.json").open("a") as log:
        log.write(" ")
    check_error(
        "accuracy.txt does not belong to the mlperf_log_accuracy.json beside it", performance, accuracy
    )
    (maker.folder / "a-file").touch()
    out = maker.submit(performance, "--output", maker.folder / "a-file", code=2)
    assert f"the submission in {maker.folder / 'a-file'} can't be written" in out and "Not a directory" in out
