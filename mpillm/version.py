"""The version of mpillm."""

__version__ = "1.0.0rc1"
