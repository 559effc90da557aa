"""``python -m mpillm fill-template``: values for the placeholders of a `config.pbtxt`.

It takes the words of `tools/fill_template.py` of TensorRT-LLM's backend for Triton. A file that
`generate-triton-config` wrote has values already: there the words change them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from disagg.errors import ConfigError, nearest
from disagg.text_file import read_text
from launch.help_format import HelpFormatter
from mpillm.errors import ExitCode
from mpillm.files import as_writable, write_text
from mpillm.triton.pbtxt import scalar

# Placeholders that get these values where nobody gives another.
_DEFAULTS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
_FORM = "name:value,name:value (a backslash before a comma or colon that is part of a value)"


def split(text: str, delimiter: str) -> list[str]:
    """Return the parts of a text between delimiters.

    A backslash makes the next character a plain one; each call takes one level of backslashes.
    """
    parts, is_plain = [""], False
    for character in text:
        if is_plain or character not in (delimiter, "\\"):
            parts[-1] += character
            is_plain = False
        elif character == delimiter:
            parts.append("")
        else:
            is_plain = True
    return parts


def placeholders(text: str) -> list[str]:
    """Return the names of a template's placeholders, ``${name}`` or ``$name``, each once."""
    found = (match["named"] or match["braced"] for match in Template.pattern.finditer(text))
    return [*dict.fromkeys(name for name in found if name)]


def substitutions(text: str) -> dict[str, str]:
    """Return values by the names of placeholders. Raises ConfigError if `text` has another form."""
    values = {}
    for part in split(text, ","):
        pair = split(part, ":")
        if len(pair) != 2:
            raise ConfigError(f"fill-template: '{part}' is no substitution: expected {_FORM}")
        values[pair[0]] = pair[1]
    return values


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return the text with values in the place of placeholders; those without a value stay."""
    return Template(text).safe_substitute(_DEFAULTS | dict(values))


# The placeholders of TensorRT-LLM's templates that are Triton's fields in files of `generate-triton-config`:
# what stands before the value, and the value. Other placeholders are parameters there.
_COUNT = r"(  count: )\d+()$"
_FIELDS = {
    "triton_backend": r'(backend: ")[^"]*(")$',
    "triton_max_batch_size": r"(max_batch_size: |  preferred_batch_size: \[)\d+(\]?)$",
    "decoupled_mode": r"(  decoupled: )\w+()$",
    "max_queue_delay_microseconds": r"(  max_queue_delay_microseconds: )\d+()$",
    "max_queue_size": r"(    max_queue_size: )\d+()$",
    "preprocessing_instance_count": _COUNT,
    "postprocessing_instance_count": _COUNT,
    "bls_instance_count": _COUNT,
}
_RENAMED = {
    "batching_strategy": "gpt_model_type",
    "encoder_engine_dir": "encoder_model_path",
    "engine_dir": "gpt_model_path",
}


def put(text: str, name: str, value: str) -> str | None:
    """Return a file of `generate-triton-config` with another value for what `name` is in a template.

    None if it has no such thing.
    """
    if (field := _FIELDS.get(name)) is None:
        key = re.escape(_RENAMED.get(name, name))
        field = rf'(  key: "{key}"\n  value {{\n    string_value: )"(?:[^"\\\n]|\\.)*"()$'
        value = scalar(value)
    text, n = re.subn(f"(?m)^{field}", lambda match: match[1] + value + match[2], text)
    return text if n else None


def main(argv: Sequence[str]) -> int:
    """Print the filled file, or write it in its place. Raises ConfigError if a name is not in the file."""
    parser = argparse.ArgumentParser(
        prog="python -m mpillm fill-template",
        description="Fill the placeholders of a config.pbtxt, as fill_template.py of TensorRT-LLM's backend.",
        epilog="example:\n  python -m mpillm fill-template -i tensorrt_llm/config.pbtxt"
        " triton_max_batch_size:4,decoupled_mode:false",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file_path", type=Path, help="the file")
    parser.add_argument("substitutions", help=_FORM)
    parser.add_argument("-i", "--in_place", "--in-place", action="store_true", help="write the file")
    words = parser.parse_args(argv)
    text = read_text(str(words.file_path)).replace("\r\n", "\n")
    values = substitutions(words.substitutions)
    known = placeholders(text)
    for name, value in values.items():
        if name in known:
            continue
        if (changed := put(text, name, value)) is not None:
            text = changed
        elif name not in text:
            listed = f"; it has: {', '.join(known)}" if known else "; it has none"
            raise ConfigError(
                f"fill-template: {words.file_path} has no placeholder '{name}'{nearest(name, known)}{listed}"
            )
        else:  # as for the script, it is enough that the file has the word
            print(f"fill-template: {words.file_path}: '{name}' is no placeholder in it", file=sys.stderr)
    filled = fill(text, values)
    if words.in_place:
        with as_writable(words.file_path):
            write_text(words.file_path, filled)
    else:
        print(filled)
    return ExitCode.DONE
