"""What a configuration of your own, as a Python file, imports: see docs/configuration.md.

The names are those of NVIDIA's submissions: a class holds values by field, `ConfigRegistry.register` says what it is for.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeVar

T = TypeVar("T", bound=type)


class HarnessType(enum.Enum):
    """--harness_type"""

    Custom = "custom"
    Triton = "triton"


class AccuracyTarget(enum.Enum):
    """--accuracy_target"""

    k_99 = 0.99
    k_99_9 = 0.999


class PowerSetting(enum.Enum):
    """--power_setting"""

    MaxP = "MaxP"
    MaxQ = "MaxQ"


class Scenario(enum.Enum):
    """--scenarios"""

    Offline = "Offline"
    Server = "Server"
    SingleStream = "SingleStream"


class Benchmark(enum.Enum):
    """--benchmarks"""

    LLAMA2 = "llama2-70b"
    LLAMA2_INTERACTIVE = "llama2-70b-interactive"
    MIXTRAL8X7B = "mixtral-8x7b"
    LLAMA3_1_405B = "llama3.1-405b"
    LLAMA3_1_405B_INTERACTIVE = "llama3.1-405b-interactive"


class _AnySystem(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class KnownSystem(metaclass=_AnySystem):
    """Systems by name: ``KnownSystem.H200x8`` is 'H200x8', the value of --system_name."""


class OfflineGPUBaseConfig:
    """A base for Offline."""

    scenario = Scenario.Offline


class ServerGPUBaseConfig:
    """A base for Server."""

    scenario = Scenario.Server


class Registered(NamedTuple):
    """A class of a configuration file, and what it is for."""

    cls: type
    settings: tuple[HarnessType | AccuracyTarget | PowerSetting, ...]


class ConfigRegistry:
    """The classes of the file that is being loaded."""

    registered: ClassVar[list[Registered]] = []

    @classmethod
    def register(cls, *settings: HarnessType | AccuracyTarget | PowerSetting) -> Callable[[T], T]:
        """Class decorator: this configuration is for that harness, accuracy and power. What is not named is open."""
        if wrong := [setting for setting in settings if not isinstance(setting, (HarnessType, AccuracyTarget, PowerSetting))]:
            raise TypeError(f"register({wrong[0]!r}): not a HarnessType, AccuracyTarget or PowerSetting")

        def decorate(config: T) -> T:
            cls.registered.append(Registered(config, settings))
            return config

        return decorate
