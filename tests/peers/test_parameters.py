"""The fields of vLLM's request classes are those of our table, which `tests/unit/endpoint` checks."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.peer_programs import FOLDER, Program
from tests.helpers.vllm_parameters import CHAT, COMPLETION, MESSAGE, STREAM_OPTIONS

pytestmark = pytest.mark.peers

CLASSES = {
    "openai/completion/protocol.py:CompletionRequest": COMPLETION,
    "openai/chat_completion/protocol.py:ChatCompletionRequest": CHAT,
    "generate/base/protocol.py:StreamOptions": STREAM_OPTIONS,
}


def fields_of(file: str, name: str) -> set[str]:
    """Return the public fields of a class in a file of vLLM, without importing it, which takes a minute."""
    (path,) = FOLDER.glob(f"lib/python3*/site-packages/vllm/{file}")
    body = ast.parse(path.read_text()).body
    (found,) = (part for part in body if isinstance(part, ast.ClassDef) and part.name == name)
    fields = (part.target for part in found.body if isinstance(part, ast.AnnAssign))
    return {one.id for one in fields if isinstance(one, ast.Name) and not one.id.startswith("_")}


@pytest.mark.parametrize("place", CLASSES)
def test_all_fields_are_in_the_table(program: Program, place: str) -> None:
    program("vllm")
    file, _, name = place.partition(":")
    assert fields_of(f"entrypoints/{file}", name) == set(CLASSES[place])


def test_all_parts_of_a_message_are_in_the_table(program: Program) -> None:
    program("vllm")
    assert fields_of("renderers/chat_utils.py", "CustomChatCompletionMessageParam") == set(MESSAGE)
