"""The interfaces of Open MPI's TCP, and why it does not connect hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import openmpi_tcp
from launch.interfaces import Interface
from launch.openmpi_tcp import exclusion, explain_disconnection, parameter

DOCKER, ETH = Interface("docker0", "172.17.0.1"), Interface("eth0", "10.77.0.1")
TWIN = Interface("tmfifo_net0", "192.168.100.1")  # the same on every host, and no bridge
HOSTS = {"h1": [ETH, DOCKER, TWIN], "h2": [Interface("eth0", "10.77.0.2"), DOCKER, TWIN]}
EXCLUDE, INCLUDE = "OMPI_MCA_btl_tcp_if_exclude", "OMPI_MCA_btl_tcp_if_include"
DEFAULT = "127.0.0.1/8,sppp"


@pytest.fixture(autouse=True)
def h1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Be h1, without a file of parameters."""
    monkeypatch.setattr(openmpi_tcp, "interfaces", lambda: HOSTS["h1"])
    monkeypatch.setattr(openmpi_tcp, "is_local", lambda one: one == DOCKER)
    monkeypatch.setattr(openmpi_tcp, "_FILES", (str(tmp_path / "mca-params.conf"),))


def test_a_bridge_of_this_host_is_excluded() -> None:
    assert exclusion(HOSTS["h1"], {}) == {EXCLUDE: f"{DEFAULT},docker0"}
    assert exclusion([ETH], {}) == {}
    assert exclusion([DOCKER], {}) == {}, "nothing else is left"


@pytest.mark.parametrize("name", ["btl_tcp_if_include", "btl_tcp_if_exclude"])
def test_the_users_choice_counts(tmp_path: Path, name: str) -> None:
    """Open MPI does not start if both are set, and a variable of ours would replace the user's."""
    assert exclusion(HOSTS["h1"], {f"OMPI_MCA_{name}": "eth0"}) == {}
    (tmp_path / "mca-params.conf").write_text(f"# ours\n{name} = eth0 \n")
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
    f"{INCLUDE}=lo": "=lo names no interface that leads to other hosts; there are: eth0 (10.77.0.1), docker0",
    f"{INCLUDE}=10.99.0.0/16,eth7": "names no interface",
    f"{EXCLUDE}=ib0": f"set {EXCLUDE}={DEFAULT},ib0",
    "": f"192.168.100.1 (tmfifo_net0) {USED} {EXCLUDE}={DEFAULT},docker0,tmfifo_net0",
    f"{EXCLUDE}=lo,tmfifo_net0": f"172.17.0.1 (docker0) {USED} {EXCLUDE}=lo,tmfifo_net0,docker0",
    f"{INCLUDE}=eth0,172.17.0.0/16": f"set {INCLUDE} to one that leads to other hosts: eth0",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_cause_is_named_with_its_remedy(setting: str) -> None:
    name, _, value = setting.partition("=")
    assert WRONG[setting] in explain_disconnection(HOSTS, {name: value} if name else {})


@pytest.mark.parametrize(
    "setting",
    ["OMPI_MCA_btl=self,sm,tcp", "OMPI_MCA_btl=^openib", f"{INCLUDE}=10.77.0.0/24", f"{INCLUDE}=eth0"],
)
def test_good_settings_are_no_cause(setting: str) -> None:
    name, _, value = setting.partition("=")
    hosts = {host: [one for one in own if one.name != "tmfifo_net0"] for host, own in HOSTS.items()}
    assert explain_disconnection(hosts, {name: value}) == "" and explain_disconnection(hosts, {}) == ""
