"""Where a tritonserver from `make triton`, and the packages for its models, are found."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm.doctor.findings import Status, World
from mpillm.doctor.installed import package_facts, programs
from mpillm.triton.embedded import numpy_note, site_packages
from mpillm.triton.tritonserver import find_tritonserver, read_repository, triton_prefix


@pytest.mark.parametrize("own", ["", "mpich"])
def test_the_environment_of_make_triton(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH's Python has an environment in the other one: with the latter's NumPy tensors would be empty."""
    purelib = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    monkeypatch.delenv("MPILLM_TRITON_PREFIX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    prefix = tmp_path / own
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(prefix / purelib))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert site_packages() == str(prefix / purelib)
    assert programs({0: package_facts()}, World({0: "a"})) == [], "the doctor sees no tritonserver here"
    made = tmp_path / "triton"
    (made / purelib).mkdir(parents=True)
    (made / "bin").mkdir()
    (made / "bin" / "tritonserver").write_text("#!/bin/sh\n")
    (made / "bin" / "tritonserver").chmod(0o755)
    (made / "installed").touch()
    assert (triton_prefix(), site_packages()) == (made, str(made / purelib))
    assert find_tritonserver(None) == str(made / "bin" / "tritonserver")
    for version, noted in (("1.26.4", False), ("2.1.0", True)):
        info = made / purelib / f"numpy-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: numpy\nVersion: {version}\n")
        assert (f"models find NumPy {version} in {made}" in numpy_note()) == noted
        (line,) = programs({0: package_facts()}, World({0: "a"}))
        assert (line.check, line.status) == ("tritonserver", Status.WARNING if noted else Status.OK)
        assert not noted or line.text == numpy_note()
        (info / "METADATA").unlink()
        info.rmdir()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('name: "m"\nmax_batch_size: ${triton_max_batch_size}\n', "2: ${triton_max_batch_size}"),
        ('name: "m" # ${comment}\nvalue: { string_value: "${tokenizer_dir}" }\n', ""),
        ("name: '${x}'\nn: ${y", "2: ${y"),
        ('name: "${x\nn: ${y}', "2: ${y}"),
        ('name: "a\\"${x}"', ""),
    ],
)
def test_placeholders_that_were_not_filled(text: str, where: str, tmp_path: Path) -> None:
    """A text is a value: TensorRT-LLM's backend takes it as one that was left out."""
    (file := tmp_path / "m" / "config.pbtxt").parent.mkdir()
    file.write_text(text)
    if not where:
        assert read_repository(tmp_path, "--triton_model_repo").folder == tmp_path
        return
    with pytest.raises(ConfigError) as caught:
        read_repository(tmp_path, "--triton_model_repo")
    assert f"{file}:{where} has no value; fill it with `python -m mpillm fill-template`" in str(caught.value)
