"""Backends by name. Adding one is one file and one line in `BackendRegistry`."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from disagg.errors import ConfigError, nearest
from mpillm.cores.base import CoreConfig, Credits, LLMCore

__all__ = ["BackendRegistry", "CoreConfig", "Credits", "LLMCore"]


class BackendRegistry:
    """Core classes by name, imported when asked for: a backend's packages cost nothing to those who use another."""

    _modules: ClassVar[dict[str, str]] = {
        "dummy": "mpillm.cores.dummy:DummyCore",
        "torch": "mpillm.cores.torch_core:TorchCore",
    }

    # Where a core's check would import the backend's packages on a rank that has no other use for them.
    _checks: ClassVar[dict[str, str]] = {"torch": "mpillm.engine.model_config:check_model"}

    @classmethod
    def check(cls, config: CoreConfig) -> Any:
        """What can be known to be wrong before anything is loaded, as ConfigError; the core's `ModelInfo`, or None without a model."""
        path = cls._checks.get(config.core_type)
        if path is None:
            return cls.get(config.core_type).check(config)
        module, _, function = path.partition(":")
        return getattr(importlib.import_module(module), function)(config)

    # Cores that run on a GPU of their own, asked without importing them.
    _on_gpus: ClassVar[frozenset[str]] = frozenset({"torch"})

    @classmethod
    def uses_gpus(cls, name: str) -> bool:
        """Whether a rank of this core takes a GPU where there is one."""
        return name in cls._on_gpus or (":" in name and cls.get(name).uses_gpus)

    @classmethod
    def register(cls, name: str, path: str) -> None:
        """Add a core: `path` is ``module:Class``."""
        cls._modules[name] = path

    @classmethod
    def names(cls) -> list[str]:
        return sorted(cls._modules)

    @classmethod
    def get(cls, name: str) -> type[LLMCore]:
        """The class; ConfigError for an unknown name or a missing package. ``module:Class`` names one outside the registry."""
        path = name if ":" in name else cls._modules.get(name)
        if path is None:
            raise ConfigError(f"--core_type {name}: no such core{nearest(name, cls.names())}; there are: {', '.join(cls.names())}")
        module, _, attribute = path.partition(":")
        if not attribute or not module or module.startswith("."):
            raise ConfigError(f"--core_type {name}: expected the name of a core, or package.module:Class")
        try:
            core = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("mpillm", "disagg", "launch"):
                raise
            extra = "" if ":" in name else f": pip install 'mpillm[{name}]'"
            raise ConfigError(f"--core_type {name} needs the package '{error.name}'{extra}") from error
        except AttributeError as error:
            raise ConfigError(f"--core_type {name}: {error}") from error
        if not (isinstance(core, type) and issubclass(core, LLMCore)):
            raise ConfigError(f"--core_type {name}: {path} is not an LLMCore")
        return core
