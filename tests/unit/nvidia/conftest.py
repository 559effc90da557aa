"""Fixtures of the tests of NVIDIA's configuration."""

from __future__ import annotations

from tests.helpers.configured import no_command_line as no_command_line
