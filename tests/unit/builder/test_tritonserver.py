"""Where a tritonserver from `make triton`, and the packages for its models, are found."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from mpillm.doctor.findings import Status, World
from mpillm.doctor.installed import package_facts, programs
from mpillm.nvidia.triton.embedded import numpy_note, site_packages
from mpillm.nvidia.triton.tritonserver import find_tritonserver, made_prefix


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
    assert (made_prefix(), site_packages()) == (made, str(made / purelib))
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
