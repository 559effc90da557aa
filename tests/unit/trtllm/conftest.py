"""For the tests of TensorRT-LLM's cores: the stand-in for its package, and cores that run on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpillm.cores.base import CoreConfig, LLMCore
from mpillm.cores.registry import BackendRegistry
from mpillm.options.options import parse_run
from tests.helpers.configured import command_line as command_line
from tests.helpers.engine_configs import engine_config
from tests.helpers.trtllm_cores import SINGLE

STAND_INS = Path(__file__).parents[2] / "helpers/stand_ins"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test import the stand-in, made anew for each."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv(SINGLE, "0")
    monkeypatch.delenv(SINGLE)  # which a core may set, until the test ends
    forget()
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an engine's folder and a Hugging Face folder in one, of which only configurations are read."""
    build = {
        "max_batch_size": 4,
        "max_input_len": 48,
        "max_seq_len": 64,
        "max_num_tokens": 32,
        "max_beam_width": 1,
    }
    both = {
        "build_config": build,
        "pretrained_config": {"vocab_size": 1000, "mapping": {"tp_size": 1, "pp_size": 1}},
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**both, "vocab_size": 1000, "max_position_embeddings": 64, "eos_token_id": 7})
    )
    return tmp_path


@pytest.fixture
def make(folder: Path, stand_in: None) -> Iterator[Callable[..., Any]]:
    """Return a loaded core; `options` are those of a command line."""
    made: list[LLMCore] = []

    def core(name: str, *options: str, check: bool = False, **more: Any) -> Any:
        engine = (
            [f"--engine_dir={folder}"]
            if name != "trtllm_hlapi" or any("trtllm_backend:cpp" in word for word in options)
            else []
        )
        config = parse_run([f"--core_type={name}", f"--model_path={folder}", *engine, *options])
        core_class = BackendRegistry.get(name)
        core_config = CoreConfig(
            name,
            engine_config(
                folder,
                engine_dir=str(folder),
                core_options=config.core_options,
                **{
                    "end_ids": (7,),
                    "max_batch_size": 4,
                    "enable_chunked_context": config.enable_chunked_context,
                    **more,
                },
            ),
            settings=core_class.settings(config),
        )
        if check:
            return core_class.check(core_config)
        made.append(core_class(core_config))
        made[-1].load()
        made[-1].run_health_check()
        return made[-1]

    yield core
    for one in made:
        one.notify_stop()
