"""Classes for a user's Python configuration file: see docs/reference/configuration.md.

The names are from NVIDIA's submissions: a class has values by field, `ConfigRegistry.register` has
its purpose.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeVar

from mpillm import core_names
from mpillm.workloads import WORKLOADS

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
    Interactive = "Interactive"


class AuditTest(enum.Enum):
    """--compliance_test, and the tests that MLCommons has retired."""

    TEST01 = "TEST01"
    TEST04 = "TEST04"
    TEST06 = "TEST06"
    TEST07 = "TEST07"
    TEST09 = "TEST09"


_BENCHMARKS = {member: workload.name for workload in WORKLOADS.values() for member in workload.members}
Benchmark = enum.Enum("Benchmark", _BENCHMARKS)  # type: ignore[misc]
"""--benchmarks"""

_CORES = {name.upper(): name for name in core_names.BUILT_IN}
CoreType = enum.Enum("CoreType", _CORES)  # type: ignore[misc]
"""--core_type"""


@dataclasses.dataclass(frozen=True)
class WorkloadSetting:
    """The purpose of an entry of EXPORTS, in NVIDIA's newer form of file."""

    harness_type: HarnessType = HarnessType.Custom
    accuracy_target: AccuracyTarget = AccuracyTarget.k_99
    power_setting: PowerSetting = PowerSetting.MaxP


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


class HopperOfflineGPUBaseConfig(OfflineGPUBaseConfig):
    """A base for Offline, under the name in NVIDIA's files."""


class HopperServerGPUBaseConfig(ServerGPUBaseConfig):
    """A base for Server, under the name in NVIDIA's files."""


class RegisteredConfig(NamedTuple):
    """A class of a configuration file, and its purpose."""

    cls: type
    settings: tuple[HarnessType | AccuracyTarget | PowerSetting, ...]
    variant: str = ""  # of NVIDIA's: one of several for a system


class ConfigRegistry:
    """The classes registered by the file that is being loaded."""

    registered: ClassVar[list[RegisteredConfig]] = []

    @classmethod
    def register(cls, *settings: HarnessType | AccuracyTarget | PowerSetting | str) -> Callable[[T], T]:
        """Class decorator: this configuration is for that harness, accuracy and power; unnamed ones: any.

        A text after these three names a variant: --config_suffix chooses it. The first one counts.
        """
        variant = settings[3] if len(settings) == 4 and isinstance(settings[3], str) else ""
        known: list[HarnessType | AccuracyTarget | PowerSetting] = []
        for setting in settings[:3] if variant else settings:
            if not isinstance(setting, (HarnessType, AccuracyTarget, PowerSetting)):
                raise TypeError(f"register({setting!r}): not a HarnessType, AccuracyTarget or PowerSetting")
            known.append(setting)

        def decorate(config: T) -> T:
            cls.registered.append(RegisteredConfig(config, tuple(known), variant))
            return config

        return decorate
