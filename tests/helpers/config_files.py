"""Configuration files of a person's own, written for tests."""

from __future__ import annotations

from pathlib import Path

from mpillm.options.command_line import Parser
from mpillm.options.fields import FIELDS
from mpillm.options.options import parse
from mpillm.options.run_config import RunConfig


def config_of(path: Path, *options: str) -> RunConfig:
    return parse(["--config_file", str(path), *options], Parser(prog="mpillm x"), FIELDS)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


REGISTERED = "from mpillm.user_config import *\n@ConfigRegistry.register(HarnessType.Custom)\nclass A:\n"

# Five configurations, of which options choose one.
SEVERAL = """\
from mpillm.user_config import *

class Base:
    core_type = "dummy"
    seed = 1

@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99, PowerSetting.MaxP)
class Offline(Base):
    scenario = Scenario.Offline
    seed = 2

@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99_9, PowerSetting.MaxP)
class High(Offline):
    seed = 3

@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99, PowerSetting.MaxP)
class Server(Base):
    scenario = Scenario.Server
    system = KnownSystem.H200x8

@ConfigRegistry.register(HarnessType.Custom, AccuracyTarget.k_99, PowerSetting.MaxQ)
class Quiet(Server):
    seed = 4
    system = KnownSystem.H100x8
"""
