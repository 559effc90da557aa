"""Headers and indexes of weights that a stranger wrote."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm.engine.shape.weight_files import INDEX, read_header, weight_files

BAD = {
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "nested in a shape": b'{"a":{"dtype":"F32","shape":' + b"[" * 100_000,
    "a negative dimension": b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}',
    "a shape of text": b'{"a":{"dtype":"F32","shape":"12","data_offsets":[0,0]}}',
    "fewer bytes than values": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}' + bytes(4),
    "more dimensions than an array has": b'{"a":{"dtype":"F32","shape":[%s9],"data_offsets":[0,0]}}'
    % (b"9," * 200_000),
    "a number that no array has": b'{"a":{"dtype":"F32","shape":['
    + b"9" * 4000
    + b',0],"data_offsets":[0,0]}}',
    "an end before its beginning": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
}


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_cannot_be(case: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(BAD[case])) + BAD[case])
    with pytest.raises(ConfigError, match="its header cannot be read"):
        read_header(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other/model.safetensors", "a/../../b", 7, "\ud800", "a\0"]
)
def test_an_index_names_files_of_its_folder(name: object, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match=r"which is not (in its folder|a file name)"):
        weight_files(tmp_path)
