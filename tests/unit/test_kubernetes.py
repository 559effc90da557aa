"""The manifests in examples/ are what the API server of Kubernetes takes, as far as schemas say."""

from __future__ import annotations

import copy
import functools
import gzip
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.support import ROOT

fastjsonschema = pytest.importorskip("fastjsonschema", reason="make install brings it")

CRDS = ROOT / "tests/data/crds"
MANIFESTS = {"mpijob.yaml": "mpijob", "leaderworkerset.yaml": "leaderworkerset"}


def strict(schema: Any) -> Any:
    """Return a schema of a CRD that takes no unknown names, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(one) for name, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@functools.cache
def check_of(kind: str) -> Any:
    """Return what raises an exception for a manifest that is none of this kind."""
    spec = json.loads(gzip.decompress((CRDS / f"{kind}.json.gz").read_bytes()))["spec"]
    (version,) = spec["versions"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"] |= {  # a CRD leaves them out: every object has them
        "apiVersion": {"enum": [f"{spec['group']}/{version['name']}"]},
        "kind": {"enum": [spec["names"]["kind"]]},
        "metadata": {"type": "object", "required": ["name"]},
    }
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["$schema"] = "http://json-schema.org/draft-04/schema"
    return fastjsonschema.compile(schema)


def pod_specs(node: Any) -> Iterator[Any]:
    """Yield the specs of all pods in a manifest."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for one in node.values():
            yield from pod_specs(one)


@pytest.fixture(params=MANIFESTS)
def manifest(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return MANIFESTS[request.param], yaml.safe_load((ROOT / "examples" / request.param).read_text())


@pytest.mark.long
def test_the_api_server_would_take_it(manifest: tuple[str, Any]) -> None:
    kind, given = manifest
    check_of(kind)(given)


def test_what_it_mounts_is_there(manifest: tuple[str, Any]) -> None:
    """The server checks this when it makes the pods."""
    specs = list(pod_specs(manifest[1]))
    assert len(specs) == 2
    for spec in specs:
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounted = {mount["name"] for one in spec["containers"] for mount in one["volumeMounts"]}
        assert mounted == volumes


def _first_container(manifest: Any) -> Any:
    return next(pod_specs(manifest))["containers"][0]


MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a name that is none": (lambda one: one["spec"].update(replica=2), "replica"),
    "a name in a container that is none": (lambda one: _first_container(one).update(comand=["x"]), "comand"),
    "a number where a text is due": (
        lambda one: _first_container(one)["command"].append(16),
        "command.* string",
    ),
    "a volume mount without a path": (
        lambda one: _first_container(one)["volumeMounts"][0].pop("mountPath"),
        "mountPath",
    ),
    "another kind": (lambda one: one.update(kind="Job"), "kind"),
    "an old version": (lambda one: one.update(apiVersion="kubeflow.org/v1"), "apiVersion"),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake, word", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(manifest: tuple[str, Any], mistake: Callable[[Any], object], word: str) -> None:
    kind, wrong = manifest[0], copy.deepcopy(manifest[1])
    mistake(wrong)
    with pytest.raises(fastjsonschema.JsonSchemaValueException, match=word):
        check_of(kind)(wrong)


def test_the_launcher_starts_as_many_ranks_as_there_are_slots(tmp_path: Path) -> None:
    job = yaml.safe_load((ROOT / "examples/mpijob.yaml").read_text())
    replicas = job["spec"]["mpiReplicaSpecs"]
    container = replicas["Launcher"]["template"]["spec"]["containers"][0]
    words = [*container["command"], *container["args"]]
    slots = replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert int(words[words.index("-n") + 1]) == slots
    hosts = tmp_path / "hostfile"
    hosts.write_text(
        "mpillm-worker-0.mpillm.default.svc slots=8\nmpillm-worker-1.mpillm.default.svc slots=8\n"
    )
    words = [str(hosts) if word == "/etc/mpi/hostfile" else word for word in words]
    words.insert(words.index("mpirun") + 1, "--dry_run")
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=300, cwd=ROOT)
    line = shlex.split(done.stdout)
    assert done.returncode == 0 and ("--hostfile", str(hosts)) in itertools.pairwise(line), done
