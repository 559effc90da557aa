"""Full disks: one message that says so, and an end in time."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.failures import ENDLESS, GRACE, GRACE_S, START_S
from tests.helpers.support import (
    NOT_READY,
    TEST_FAILED,
    Starter,
    make_samples,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Any]:
    """Yield what makes a file system of some kilobytes."""
    mounted: list[Path] = []

    def make(kilobytes: int) -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", path], capture_output=True
        ).returncode:
            pytest.skip("mounting a small tmpfs takes root, and here even root may not")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_disk_that_is_full_at_the_start(one: Starter, small_disk: Any) -> None:
    ended = one.run(3, *GRACE, log_dir=small_disk(4) / "run")
    ended.must(NOT_READY)
    assert "No space left on device" in ended.message
    assert str(ended.log_dir) in ended.message
    assert ended.seconds < START_S


@pytest.mark.parametrize("kilobytes", [24, 76])
def test_a_disk_that_the_records_of_a_run_fill(one: Starter, small_disk: Any, kilobytes: int) -> None:
    """A write that fails names its file, and prints no lines of the program."""
    ended = one.run(2, *GRACE, "--min_query_count", 24, log_dir=small_disk(kilobytes) / "run")
    assert ended.code in (NOT_READY, TEST_FAILED), ended
    assert re.search(rf"{re.escape(str(ended.log_dir))}.*: No space left on device", ended.message), ended
    assert 'File "' not in ended.out + ended.err and "Errno" not in ended.out + ended.err


def test_a_disk_that_the_answers_fill(both: Starter, small_disk: Any) -> None:
    log_dir = small_disk(512) / "run"
    options = [*ENDLESS, "--server_target_qps", 400, "--core_options", "tpot_ms:0.1", "--save_outputs"]
    ended = both.run(3, *options, log_dir=log_dir)
    ended.must(TEST_FAILED)
    assert "No space left on device" in ended.message
    assert "outputs.jsonl" in ended.message or "requests.bin" in ended.message
    assert "in phase 'test'" in ended.message
    assert ended.seconds < START_S + GRACE_S + 5


def test_a_disk_that_loadgen_fills(one: Starter, small_disk: Any, tmp_path: Path) -> None:
    """LoadGen writes its log of answers (1 MB here) without looking whether that worked."""
    samples = make_samples(tmp_path / "many.jsonl", [10] * 1000)
    options = ["--test_mode", "AccuracyOnly", "--dataset_path", samples.path, "--max_output_len", 128]
    ended = one.run(3, *GRACE, *options, log_dir=small_disk(512) / "run")
    ended.must(TEST_FAILED)
    # our record of the requests finds the disk full, or the verdict finds LoadGen's logs incomplete
    assert "disk full" in ended.message or "requests.bin: No space left on device" in ended.message
    assert ended.seconds < START_S
