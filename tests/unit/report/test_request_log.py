"""The record of each request: written as answers come, readable at any time."""

from __future__ import annotations

import errno
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.comms.messages import PROMPT_COUNTS
from mpillm.report.request_log import MAGIC, RECORD, RequestLog, damaged_requests, read_requests
from tests.helpers.run_directories import read_rows, write_rows

NAN = float("nan")


def add(log: RequestLog, issued: list[float], first: list[float], ended: float) -> None:
    n = len(issued)
    error = np.arange(n) % 2 == 1
    counts = np.zeros(n, PROMPT_COUNTS)
    counts["prompt"], counts["cached"] = 9, np.arange(n) - 1
    columns = np.arange(n), np.full(n, 7), error, counts, np.full(n, 3, np.uint32)
    log.add(np.array(issued), np.array(first), ended, *columns)


def test_requests_come_back_in_order_of_issue(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    add(log, [2.0, 3.0], [2.5, NAN], 4.0)
    add(log, [1.0], [1.25], 5.0)
    log.flush()
    rows = read_requests(tmp_path)
    assert rows["issued"].tolist() == [1.0, 2.0, 3.0] and rows["latency"].tolist() == [4.0, 2.0, 1.0]
    assert rows["ttft"][:2].tolist() == [0.25, 0.5] and np.isnan(rows["ttft"][2])
    assert (rows["tokens"].tolist(), rows["error"].tolist()) == ([7, 7, 7], [0, 0, 1])
    assert (rows["prompt"].tolist(), rows["cached"].tolist()) == ([9, 9, 9], [-1, -1, 0])
    log.close()
    log.flush()  # rank 0 looks until it has stopped
    assert len(read_requests(tmp_path)) == 3


def test_single_answers_come_between_others(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    log.add_one(1.0, 1.5, 3.0, 4, 2, False)
    add(log, [1.0, 1.0], [1.25, 1.25], 4.0)
    log.add_one(1.0, NAN, 6.0, 5, 0, True, (9, 8), 4)
    log.close()
    rows = read_rows(tmp_path)
    assert rows["latency"].tolist() == [2.0, 3.0, 3.0, 5.0]
    assert rows["index"].tolist() == [4, 0, 1, 5] and rows["tokens"].tolist() == [2, 7, 7, 0]
    assert rows["session"].tolist() == [0, 3, 3, 4] and rows["cached"].tolist() == [-1, -1, 0, 8]
    assert rows["error"].tolist() == [0, 0, 1, 1] and np.isnan(rows["ttft"]).tolist() == [False] * 3 + [True]


def test_it_keeps_little_however_many_answers_come_together(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    n = 1024
    tracemalloc.start()
    for i in range(300):
        columns = np.full(n, i + 0.5), np.full(n, i + 0.6), i + 0.7, np.arange(n), np.arange(n)
        log.add(*columns, np.zeros(n, np.bool_), np.zeros(n, PROMPT_COUNTS), np.zeros(n, np.uint32))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    log.close()
    assert most < 1 << 20, f"{most} bytes"
    assert len(read_requests(tmp_path)) == 300 * n


def test_a_record_that_was_cut_is_left_out(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    add(log, [1.0, 2.0], [1.5, 2.5], 3.0)
    log.close()
    file = tmp_path / "requests.bin"
    file.write_bytes(file.read_bytes()[: len(MAGIC) + RECORD.itemsize + 5])
    assert read_requests(tmp_path)["issued"].tolist() == [1.0]


def test_a_record_that_no_run_writes_is_left_out_and_counted(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    add(log, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.5, 2.5, 3.5, 4.5, 5.5, NAN], 7.0)
    log.close()
    file = tmp_path / "requests.bin"
    assert damaged_requests(tmp_path) == (0, 6)
    rows = read_rows(tmp_path)
    rows["issued"][0], rows["latency"][1], rows["ttft"][2] = NAN, np.inf, -1e30
    rows["index"][3], rows["tokens"][4] = -1, -5
    write_rows(tmp_path, rows)
    assert read_requests(tmp_path)["issued"].tolist() == [6.0]
    assert damaged_requests(tmp_path) == (5, 6)
    random = np.random.default_rng(1)
    for beginning in (b"", MAGIC):
        file.write_bytes(beginning + random.bytes(32 * 1000))
        assert len(read_requests(tmp_path)) < 10
    file.unlink()
    assert damaged_requests(tmp_path) == (0, 0)


def test_a_file_of_an_older_mpillm(tmp_path: Path) -> None:
    """Its records have 28 bytes, without the cached tokens."""
    one = struct.pack("<dffiiI", 1.0, 0.5, 2.0, 3, 4, 0) + struct.pack("<dffiiI", 0.5, NAN, 2.0, 1, 0, 1)
    (tmp_path / "requests.bin").write_bytes(one + b"half")
    rows = read_requests(tmp_path)
    assert rows["index"].tolist() == [1, 3] and rows["error"].tolist() == [1, 0]
    assert rows["latency"].tolist() == [2.0, 2.0] and rows["cached"].tolist() == rows["prompt"].tolist() == [
        -1,
        -1,
    ]


def test_a_file_of_a_version_that_was_never_released(tmp_path: Path) -> None:
    (tmp_path / "requests.bin").write_bytes(b"requests" + bytes(40))
    with pytest.raises(ConfigError, match=r"requests\.bin: a version .* never released; repeat the test"):
        read_requests(tmp_path)


def test_turns_are_those_of_the_data_set(tmp_path: Path) -> None:
    """The first request of the second conversation was cancelled, so it has no record."""
    log = RequestLog(tmp_path, np.array([0, 2, 5]))
    for index in (1, 3, 0, 4):
        log.add_one(1.0 + index, 1.5 + index, 9.0, index, 2, False, session=1 + (index > 1))
    log.close()
    rows = read_requests(tmp_path)
    assert rows["index"].tolist() == [0, 1, 3, 4] and rows["turn"].tolist() == [0, 1, 1, 2]


def test_a_test_without_answers_has_no_file(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    log.flush()
    log.close()
    with pytest.raises(ConfigError, match=r"has no requests.bin: none of its requests was answered"):
        read_requests(tmp_path)


def test_the_error_of_a_full_disk_names_the_file() -> None:
    log = RequestLog(Path("/dev"))
    log._path = Path("/dev/full")
    add(log, [1.0], [1.5], 2.0)
    with pytest.raises(OSError) as raised:
        log.flush()
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "/dev/full")


def test_it_is_read_by_the_name_of_the_directory_or_of_the_file(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    log.add_one(0.0, 0.1, 0.2, 3, 4, False)
    log.close()
    for name in (tmp_path, str(tmp_path), str(tmp_path / "requests.bin")):
        assert read_requests(name)["index"].tolist() == [3]
