"""Published forms of a disaggregation YAML, converted to TensorRT-LLM's `disagg_config`, which mpillm reads.

`_FORMS` lists the forms. A conversion is in `published_forms`, or in `published_dynamo`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import disagg
from disagg import DisaggConfig
from disagg.config import EXAMPLE
from disagg.errors import ConfigError
from disagg.llm_args import LLM_ARGUMENTS
from disagg.schema import RUN_WIDE, SECTIONS, SERVER
from disagg.text_file import read_text
from disagg.yaml_text import documents, plain, read
from mpillm.options import published_dynamo
from mpillm.options.columns import INDENT, WIDTH
from mpillm.options.published_forms import RECIPES, PublishedForm
from mpillm.options.published_servers import Node
from mpillm.programs.load_clients.client_files import check_no_client_file


def load(path: str) -> tuple[DisaggConfig, str, tuple[str, ...]]:
    """Read the disaggregation YAML at `path`, in any form.

    Returns:
        The configuration; the name of the published form, or "" for a `disagg_config`; and lines that name
        the form and the settings that are not used, of at most 78 columns unless a name is longer.

    Raises ConfigError for a file that cannot be used.
    """
    text = read_text(path)
    try:
        data = read(text, path)
    except ConfigError:
        data = _manifests(text, path)
        if not _is_manifest(data):
            raise
    check_no_client_file("--disagg_config", path, data)
    if not {*SECTIONS}.isdisjoint(data):
        return disagg.from_mapping(data, path), "", ()
    data = plain(data, path)
    form = next((form for form in _FORMS if form.is_form(data)), None)
    if form is None:
        return disagg.from_mapping(data, path), "", ()
    node = Node(data, path)
    try:
        config = disagg.from_mapping(form.convert(node), path)
    except ConfigError as error:
        raise ConfigError(f"{path} is {form.name}\n{error}") from None
    unread = f"; not used here: {node.unread}" if node.unread else ""
    lines = [f"{path} is {form.name}{unread}", *node.lines, *node.unused()]
    return config, form.name, tuple(map(_wrapped, lines))


def _wrapped(line: str) -> str:
    """Wrap a list of names, which may be long, also where the output is not a terminal."""
    width = WIDTH - len(INDENT)
    return textwrap.fill(
        line, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )


def _is_manifest(data: Mapping[str, Any]) -> bool:
    return "apiVersion" in data and "kind" in data


def _manifests(text: str, path: str) -> Mapping[str, Any]:
    """Return the manifest of a file of several, or of a template, which is not YAML; {} if there is none."""
    keys = dict.fromkeys(re.findall(r"^(apiVersion|kind):", text, re.MULTILINE))
    try:
        content = documents(text, path) if keys else []
    except ConfigError:
        return keys
    return published_dynamo.with_others(content) or keys


def _refused(why: str) -> Callable[[Node], dict[str, Any]]:
    """Return the conversion of a form that cannot be used."""

    def refuse(node: Node) -> dict[str, Any]:
        raise ConfigError(f"{why}, such as\n{EXAMPLE}")

    return refuse


_FORMS = (
    *RECIPES,
    published_dynamo.FORM,
    PublishedForm(
        "a Kubernetes manifest",
        _is_manifest,
        _refused("it describes pods; write the numbers and sizes of its servers as two sections"),
    ),
    PublishedForm(
        "the LLM-API options of one server (trtllm-serve --config)",
        lambda data: data.keys() <= {*LLM_ARGUMENTS, *SERVER} and not data.keys() <= {*RUN_WIDE},
        _refused("it lacks the other phase and the numbers of servers; copy its lines into a section of two"),
    ),
    PublishedForm(
        "a list of environment variables",
        lambda data: bool(data) and all(re.fullmatch("[A-Z][A-Z0-9_]*", name) for name in data),
        _refused("export them where you start mpillm; --disagg_config needs a file with two sections"),
    ),
)
