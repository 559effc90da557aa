"""The prompt of a request to a chat endpoint: the first members of its JSON, `tools` and `messages`.

The array `messages` stays open, and the client closes it. So a request of a conversation begins with the
complete prompt of the request before it, like the tokens that a server makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.data.chat_template import Messages, Tools
from mpillm.data.tokenizer import ByteTokenizer

TOKENS_AS_CHAT = (
    "prompts are token ids, which cannot be sent as a chat; give texts or messages, or use"
    " --endpoint_type completions"
)


def chat_prompt(messages: Messages, tools: Tools = None) -> str:
    """Return the prompt of a request with these messages. Raises ValueError if they are not JSON."""
    first = f'"tools":{_json(tools)},' if tools else ""
    return f'{first}"messages":[{",".join(map(_json, messages))}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class ChatRequests(ByteTokenizer):
    """The "tokenizer" of requests to a chat endpoint: their prompts' bytes are the tokens."""

    def encode(self, prompt: str) -> list[int]:
        return list(chat_prompt([{"role": "user", "content": prompt}]).encode())

    def encode_batch(self, prompts: Sequence[str]) -> list[list[int]]:
        return [self.encode(prompt) for prompt in prompts]

    def encode_chats(self, chats: Sequence[Messages], tools: Tools = None) -> list[list[int]]:
        return [self.tokens_of(messages, tools).tolist() for messages in chats]

    def tokens_of(self, messages: Messages, tools: Tools = None) -> NDArray[np.int32]:
        """Return the tokens of a request with these messages. Raises as `chat_prompt`."""
        return np.frombuffer(chat_prompt(messages, tools).encode(), np.uint8).astype(np.int32)
