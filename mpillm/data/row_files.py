"""Rows of a data set's file: lines of JSON, CSV, text, or Parquet and Arrow, compressed or not.

A file's first bytes determine its format. If they do not, its name does. The error for another format
contains a command that converts the file.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import shlex
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from disagg.errors import ConfigError, nearest
from disagg.text_file import check_file
from mpillm.data.json_array import array_rows, not_lines

Row = tuple[int, Any]  # line or number of a row, and its content: an object, or text
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zip", ".zst")
_BOM = b"\xef\xbb\xbf"
_MAX_FIELD = 1 << 26  # bytes of a CSV field
_MAX_GROWTH, _MIN_UNPACKED = 200, 64 << 20  # a file may unpack to 200 bytes per byte, and always to 64 MiB
_UNPACK_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


class _Kind(NamedTuple):
    """A format with characteristic first bytes."""

    magic: bytes
    name: str
    convert: str = ""  # a command, with {file}; empty: mpillm reads the format


_ZIP, _PARQUET, _ARROW, _FEATHER = "a zip archive", "a Parquet file", "an Arrow file", "a Feather file"
_STREAM = "an Arrow stream"
_KINDS = (
    _Kind(b"\x1f\x8b", "gzip"),
    _Kind(b"BZh", "bzip2"),
    _Kind(b"\xfd7zXZ\x00", "xz"),
    _Kind(b"PK\x03\x04", _ZIP),
    _Kind(b"PAR1", _PARQUET),
    _Kind(b"ARROW1", _ARROW),
    _Kind(b"FEA1", _FEATHER),
    _Kind(b"\xff\xff\xff\xff", _STREAM),
    _Kind(b"\x28\xb5\x2f\xfd", "a Zstandard file", "zstd -dc {file} > prompts.jsonl"),
    _Kind(
        b"SQLite format 3\x00",
        "an SQLite database",
        'sqlite3 -csv -header {file} "select * from TABLE" > prompts.csv',
    ),
    _Kind(b"\xff\xfe", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > prompts.jsonl"),
    _Kind(b"\xfe\xff", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > prompts.jsonl"),
    _Kind(
        b"\x89HDF",
        "an HDF5 file",
        'python3 -c \'import pandas, sys; pandas.read_hdf(sys.argv[1]).to_json("prompts.jsonl",'
        ' orient="records", lines=True)\' {file}',
    ),
)
_OPENERS: dict[str, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}


def is_row_file(path: Path) -> bool:
    """Return whether a file with this name has rows. A workload's other files are preprocessed."""
    name = path.name
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.endswith((*TEXT_SUFFIXES, *TABLE_SUFFIXES))


def read_rows(file: Path, *, may_be_array: bool = False) -> Iterator[Row]:
    """Yield the rows that are not blank. Raises ConfigError with the file and the wrong line.

    `may_be_array`: the file may also be one JSON array, which has to fit the memory.
    """
    check_file(file)
    try:
        with file.open("rb") as stream:
            yield from _rows(file, file.name, stream, may_be_array)
    except FileNotFoundError as error:
        siblings = [sibling.name for sibling in file.parent.glob("*")]
        raise ConfigError(f"data set {file} does not exist{nearest(file.name, siblings)}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"data set {file} is a directory, not a JSONL file") from error
    except OSError as error:
        raise ConfigError(f"data set {file} cannot be read: {error}") from error


def _array_rows(file: Path, stream: IO[bytes]) -> Iterator[Row]:
    try:
        yield from array_rows(_decoded(stream.read().removeprefix(_BOM)))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}:{error.lineno}: not valid JSON: {error.msg}, column {error.colno}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error


def _rows(
    file: Path, name: str, stream: Any, may_be_array: bool, *, is_unpacked: bool = False
) -> Iterator[Row]:
    start = stream.peek(1)
    kind = next((kind for kind in _KINDS if start.startswith(kind.magic)), None)
    if is_unpacked and kind and (kind.name in _OPENERS or kind.name == _ZIP):  # nesting may be endless
        raise ConfigError(f"data set {file}: {kind.name} in a packed file; unpack it first")
    if kind is None:
        yield from _text_rows(file, name, stream, start, may_be_array)
    elif kind.convert:
        raise ConfigError(_refusal(file, kind.name, kind.convert))
    elif kind.name in _OPENERS:
        with _unpacked(file, _OPENERS[kind.name](stream)) as inner:
            yield from _rows(file, name.rpartition(".")[0] or name, inner, may_be_array, is_unpacked=True)
    elif kind.name == _ZIP:
        yield from _zip_rows(file, stream, may_be_array)
    else:
        yield from _table_rows(file, kind.name, stream)


def _refusal(file: Path, name: str, convert: str) -> str:
    return f"data set {file} is {name}; make JSONL of it by\n  {convert.format(file=shlex.quote(str(file)))}"


class _LimitedReader(io.RawIOBase):
    """Content of a compressed file, up to a limit, because a small file must not fill the memory."""

    def __init__(self, file: Path, stream: IO[bytes]) -> None:
        self._file, self._stream, self._n = file, stream, 0
        self._max_bytes = max(_MIN_UNPACKED, _MAX_GROWTH * file.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except _UNPACK_ERRORS as error:
            raise ConfigError(f"data set {self._file}: truncated or damaged: {error}") from None
        self._n += len(data)
        if self._n > self._max_bytes:
            raise ConfigError(
                f"data set {self._file}: expands to more than {self._max_bytes} bytes, {_MAX_GROWTH} times"
                " its size; unpack it first"
            )
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def _unpacked(file: Path, stream: IO[bytes]) -> Iterator[IO[bytes]]:
    with stream, io.BufferedReader(_LimitedReader(file, stream), 1 << 16) as inner:
        yield inner


def _zip_rows(file: Path, stream: IO[bytes], may_be_array: bool) -> Iterator[Row]:
    try:
        with zipfile.ZipFile(stream) as archive:
            members = [member for member in archive.infolist() if not member.filename.endswith("/")]
            if len(members) != 1:
                names = ", ".join(member.filename[:60] for member in members[:5]) or "nothing"
                raise ConfigError(
                    _refusal(file, f"a zip archive of {names}", "unzip -p {file} MEMBER > prompts.jsonl")
                )
            with _unpacked(file, archive.open(members[0])) as inner:
                yield from _rows(file, members[0].filename, inner, may_be_array, is_unpacked=True)
    except ConfigError:  # a ValueError, from a row
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(f"data set {file}: not a zip archive that can be read: {error}") from None


def _table_rows(file: Path, kind: str, stream: IO[bytes]) -> Iterator[Row]:
    """Yield the rows of a table. This needs the extra parquet."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        read = "read_parquet" if kind == _PARQUET else "read_feather"
        program = (
            f'import pandas, sys; pandas.{read}(sys.argv[1]).to_json("prompts.jsonl",'
            ' orient="records", lines=True)'
        )
        raise ConfigError(
            f"data set {file} is {kind}, which needs pyarrow: pip install 'mpillm[parquet]', or make JSONL of"
            f" it where pandas and pyarrow are by\n  python3 -c '{program}' {shlex.quote(str(file))}"
        ) from None
    numbers = itertools.count(1)
    try:
        if kind == _PARQUET:
            batches = pyarrow.parquet.ParquetFile(stream).iter_batches(1024)
        elif kind == _STREAM:
            batches = iter(pyarrow.ipc.open_stream(stream))
        else:
            reader = pyarrow.ipc.open_file(stream)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        for batch in batches:
            for row in batch.to_pylist():
                yield next(numbers), row
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"data set {file}: not {kind} that can be read: {error}") from None


def _text_rows(file: Path, name: str, stream: Any, start: bytes, may_be_array: bool) -> Iterator[Row]:
    if name.endswith((".csv", ".tsv")):
        yield from _csv_rows(file, stream, "\t" if name.endswith(".tsv") else ",")
        return
    is_text = name.endswith(".txt")
    if not is_text and start.removeprefix(_BOM).lstrip().startswith(b"["):
        if not may_be_array and name != file.name:
            raise ConfigError(f"data set {file}: a JSON array in a packed file; unpack it first")
        if not may_be_array:
            raise ConfigError(not_lines(file, b'"conversations"' in start))
        yield from _array_rows(file, stream)
        return
    for number, line in enumerate(stream, 1):
        raw = line.removeprefix(_BOM) if number == 1 else line
        if raw.strip():
            try:
                text = _decoded(raw)
                yield number, text.strip("\r\n") if is_text else _json(text, raw.endswith(b"\n"))
            except ValueError as error:
                raise ConfigError(f"{file}:{number}: {error}") from error


def _csv_rows(file: Path, stream: IO[bytes], delimiter: str) -> Iterator[Row]:
    """Yield the rows as objects, with the names in the first row as keys."""
    csv.field_size_limit(_MAX_FIELD)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(
                    f"{file}:{reader.line_num}: its number of fields differs from the header's,"
                    f" {len(reader.fieldnames or ())}"
                )
            yield reader.line_num, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}:{reader.line_num}: not CSV in UTF-8: {error}") from None


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error


def _json(text: str, has_line_end: bool) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        cut = "" if has_line_end else "; the file ends here: is it truncated?"
        raise ValueError(f"not valid JSON: {error}{cut}") from error
