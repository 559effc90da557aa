"""Fixtures of the tests of NVIDIA's configuration."""

from __future__ import annotations

from tests.helpers.configured import command_line as command_line
