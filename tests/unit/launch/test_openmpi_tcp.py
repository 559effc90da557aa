"""The interfaces of Open MPI's TCP, and why it does not connect hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.interfaces import Interface
from launch.openmpi_tcp import exclusion, explain_disconnection, parameter

BMC, ETH = Interface("usb0", "169.254.3.1"), Interface("eth0", "10.77.0.1")
TWIN = Interface("tmfifo_net0", "192.168.100.1")  # the same on every host, and no bridge
HOSTS = {"h1": [ETH, BMC, TWIN], "h2": [Interface("eth0", "10.77.0.2"), BMC, TWIN]}
EXCLUDE, INCLUDE = "OMPI_MCA_btl_tcp_if_exclude", "OMPI_MCA_btl_tcp_if_include"
DEFAULT = "127.0.0.1/8,sppp"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a home without a file of parameters."""
    monkeypatch.setenv("HOME", str(tmp_path))


def test_an_interface_that_reaches_no_other_host_is_excluded() -> None:
    assert exclusion(HOSTS["h1"], {}) == {EXCLUDE: f"{DEFAULT},usb0"}
    assert exclusion([ETH], {}) == {}
    assert exclusion([BMC], {}) == {}, "nothing else is left"


@pytest.mark.parametrize("name", ["btl_tcp_if_include", "btl_tcp_if_exclude"])
def test_the_users_choice_counts(tmp_path: Path, name: str) -> None:
    """Open MPI does not start if both are set, and a variable of ours would replace the user's."""
    assert exclusion(HOSTS["h1"], {f"OMPI_MCA_{name}": "eth0"}) == {}
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi/mca-params.conf").write_text(f"# ours\n{name} = eth0 \n")
    assert parameter(name, {}) == "eth0" and exclusion(HOSTS["h1"], {}) == {}
    assert parameter(name, {f"OMPI_MCA_{name}": "eth1"}) == "eth1"


def test_the_file_of_the_installation_counts(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/openmpi-mca-params.conf").write_text("btl_tcp_if_include=eth0\n")
    assert exclusion(HOSTS["h1"], {"OPAL_PREFIX": str(tmp_path)}) == {}


USED = "is an address of h1 and of h2, and Open MPI's TCP uses it; set"
WRONG = {
    "OMPI_MCA_btl=self,sm": "OMPI_MCA_btl=self,sm leaves out tcp",
    "OMPI_MCA_btl=^tcp,openib": "OMPI_MCA_btl=^tcp,openib leaves out tcp",
    f"{INCLUDE}=lo": "=lo names no interface that leads to other hosts; there are: eth0 (10.77.0.1), usb0",
    f"{INCLUDE}=10.99.0.0/16,eth7": "names no interface",
    f"{EXCLUDE}=ib0": f"set {EXCLUDE}={DEFAULT},ib0",
    "": f"192.168.100.1 (tmfifo_net0) {USED} {EXCLUDE}={DEFAULT},usb0,tmfifo_net0",
    f"{EXCLUDE}=lo,tmfifo_net0": f"169.254.3.1 (usb0) {USED} {EXCLUDE}=lo,tmfifo_net0,usb0",
    f"{INCLUDE}=eth0,169.254.0.0/16": f"set {INCLUDE} to one that leads to other hosts: eth0",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_cause_is_named_with_its_remedy(setting: str) -> None:
    name, _, value = setting.partition("=")
    assert WRONG[setting] in explain_disconnection(HOSTS["h1"], HOSTS, {name: value} if name else {})


@pytest.mark.parametrize(
    "setting",
    ["OMPI_MCA_btl=self,sm,tcp", "OMPI_MCA_btl=^openib", f"{INCLUDE}=10.77.0.0/24", f"{INCLUDE}=eth0"],
)
def test_good_settings_are_no_cause(setting: str) -> None:
    name, _, value = setting.partition("=")
    hosts = {host: [one for one in own if one.name != "tmfifo_net0"] for host, own in HOSTS.items()}
    for env in ({name: value}, {}):
        assert explain_disconnection(HOSTS["h1"], hosts, env) == ""
