"""Find a core's class by name: built in, an entry point, or ``module:Class``."""

from __future__ import annotations

import importlib.util
import inspect
from typing import TYPE_CHECKING

from disagg.errors import ConfigError, about, nearest
from mpillm import core_names
from mpillm.core_names import EXTRAS, lacks, load_object
from mpillm.cores.base import LLMCore
from mpillm.errors import missing_package

if TYPE_CHECKING:
    from mpillm.options.run_config import RunConfig


class BackendRegistry:
    """Core classes by name, imported on demand: a backend's packages do not slow down other backends."""

    @classmethod
    def register(cls, name: str, path: str) -> None:
        """Add a core, ``module:Class``, to this process. A package uses ``mpillm.cores`` entry points."""
        core_names.registered[name] = path

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the cores that can run a test."""
        return core_names.names()

    @classmethod
    @about("core_type")
    def get(cls, name: str) -> type[LLMCore]:
        """Return the class of a core that can run a test.

        Raises ConfigError as `declared` does, or if the class lacks methods.
        """
        core = cls.declared(name)
        if inspect.isabstract(core):
            lacking = ", ".join(sorted(core.__abstractmethods__))
            raise ConfigError(f"--core_type {name}: the class lacks {lacking}")
        return core

    @classmethod
    @about("core_type")
    def declared(cls, name: str) -> type[LLMCore]:
        """Return the class of a core, for its declarations.

        Raises ConfigError for an unknown name, or a missing package.
        """
        path = core_names.class_path(name)
        if path is None:
            raise ConfigError(
                f"--core_type {name}: no such core{nearest(name, cls.names())};"
                f" there are: {', '.join(cls.names())}"
            )
        module, _, attribute = path.partition(":")
        if not attribute or not module or module.startswith("."):
            raise ConfigError(f"--core_type {name}: expected the name of a core, or package.module:Class")
        try:
            core = load_object(path)
        except (ModuleNotFoundError, RuntimeError) as error:
            if not (package := missing_package(error)):
                raise
            extra = f": pip install 'mpillm[{EXTRAS[name]}]'" if name in EXTRAS else ""
            raise ConfigError(f"--core_type {name} needs the package '{package}'{extra}") from error
        except AttributeError as error:
            raise ConfigError(f"--core_type {name}: {error}") from error
        if adapter := getattr(core, "rank_core", None):  # a core of `mpillm.llmlib`
            core = load_object(adapter)(core)
        if not (isinstance(core, type) and issubclass(core, LLMCore)):
            raise ConfigError(f"--core_type {name}: {path} is not an LLMCore")
        return core


def check_core(config: RunConfig) -> None:
    """Raise ConfigError if `config`, with its YAML, lacks what the core needs."""
    core = BackendRegistry.get(config.core_type)
    if missing := next((name for name in core.imports if importlib.util.find_spec(name) is None), None):
        raise ConfigError(f"--core_type {config.core_type}: {lacks(missing)}", about=["core_type"])
    if not core.needs_model:
        return
    if not config.model_path:
        raise ConfigError(
            f"--core_type {config.core_type} needs --model_path: a Hugging Face folder"
            " (`python -m mpillm fetch-model smollm2-135m` brings a small one),"
            " or a preset with random weights (`--model_path tiny-llama`)",
            about=["core_type", "model_path"],
        )
    if config.precision in ("fp4", "nvfp4") and config.quantization == "auto":
        raise ConfigError(
            f"{config.named('precision')}: the {config.core_type} core has no such weights;"
            " choose them with --quantization"
        )
