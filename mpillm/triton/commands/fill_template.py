"""``python -m mpillm fill-template``: set the placeholders of a `config.pbtxt`.

It has the arguments of `tools/fill_template.py` of TensorRT-LLM's backend for Triton. In a file of
`generate-triton-config`, which has no placeholders, it changes the values.
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

# Defaults of placeholders.
_DEFAULTS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
_FORM = "name:value,name:value (a backslash before a comma or colon that is part of a value)"


def split(text: str, delimiter: str) -> list[str]:
    """Split a text at delimiters. A backslash escapes the next character; each call removes one level."""
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
    """Return the distinct names of a template's placeholders, ``${name}`` or ``$name``."""
    names = (match["named"] or match["braced"] for match in Template.pattern.finditer(text))
    return [*dict.fromkeys(name for name in names if name)]


def substitutions(text: str) -> dict[str, str]:
    """Parse values by placeholder. Raises ConfigError."""
    values = {}
    for part in split(text, ","):
        pair = split(part, ":")
        if len(pair) != 2:
            raise ConfigError(f"fill-template: '{part}' is not a substitution; expected {_FORM}")
        values[pair[0]] = pair[1]
    return values


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders that have a value or a default."""
    return Template(text).safe_substitute(_DEFAULTS | dict(values))


# Placeholders of TensorRT-LLM's templates that are fields of Triton in files of `generate-triton-config`: the
# text around the value. Other placeholders are parameters there.
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
    """Set a placeholder's value in a file of `generate-triton-config`; None if the file has no such value."""
    if (field := _FIELDS.get(name)) is None:
        key = re.escape(_RENAMED.get(name, name))
        field = rf'(  key: "{key}"\n  value {{\n    string_value: )"(?:[^"\\\n]|\\.)*"()$'
        value = scalar(value)
    text, n = re.subn(f"(?m)^{field}", lambda match: match[1] + value + match[2], text)
    return text if n else None


def main(argv: Sequence[str]) -> int:
    """Print the filled file, or overwrite the file. Raises ConfigError if a name is not in the file."""
    parser = argparse.ArgumentParser(
        prog="python -m mpillm fill-template",
        description="Fill the placeholders of a config.pbtxt, like TensorRT-LLM's fill_template.py.",
        epilog="example:\n  python -m mpillm fill-template -i tensorrt_llm/config.pbtxt"
        " triton_max_batch_size:4,decoupled_mode:false",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file_path", type=Path, help="the file")
    parser.add_argument("substitutions", help=_FORM)
    parser.add_argument("-i", "--in_place", "--in-place", action="store_true", help="write the file")
    args = parser.parse_args(argv)
    text = read_text(str(args.file_path)).replace("\r\n", "\n")
    values = substitutions(args.substitutions)
    known = placeholders(text)
    for name, value in values.items():
        if name in known:
            continue
        if (changed := put(text, name, value)) is not None:
            text = changed
        elif name not in text:
            listed = f"; it has: {', '.join(known)}" if known else "; it has none"
            raise ConfigError(
                f"fill-template: {args.file_path} has no placeholder '{name}'{nearest(name, known)}{listed}"
            )
        else:  # like the script, accept any text of the file
            print(f"fill-template: {args.file_path}: '{name}' is not a placeholder in it", file=sys.stderr)
    filled = fill(text, values)
    if args.in_place:
        with as_writable(args.file_path):
            write_text(args.file_path, filled)
    else:
        print(filled)
    return ExitCode.DONE
