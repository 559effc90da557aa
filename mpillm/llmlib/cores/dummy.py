"""The core `dummy`, for tests."""

from mpillm.llmlib.cores.built_in import BuiltInCore


class DummyCore(BuiltInCore):
    """The core `dummy`, for tests."""

    core_type = "dummy"
