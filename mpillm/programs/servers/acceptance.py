"""--acceptance_length of a server that the run starts: helpers to find its speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

OPTION = "acceptance_length"
"""mpillm's option: mean tokens of a verification step, including the model's own token."""


def value_of(args: Sequence[str], flag: str) -> tuple[int, str] | None:
    """Return the last index and the value of a flag, as ``--flag VALUE`` or ``--flag=VALUE``; None if absent.

    Hyphens and underscores are equal in flags, as in the servers' parsers.
    """
    for index in range(len(args) - 1, -1, -1):
        name, equals, value = args[index].partition("=")
        if name.replace("_", "-") == flag:
            if equals:
                return index, value
            return (index, args[index + 1]) if index + 1 < len(args) else None
    return None


def number_of(value: object) -> int | None:
    """Return a number of draft tokens from a server's setting; None if it is not a whole number."""
    try:
        return int(str(value))
    except ValueError:
        return None


def check_length(length: float, n_draft: int | None) -> None:
    """Raise ValueError if a verification of `n_draft` draft tokens cannot yield `length` tokens.

    `n_draft`: None if only the server knows the number, from its draft model.
    """
    if n_draft is not None and length > n_draft + 1:
        raise ValueError(
            f"verifies {n_draft} draft tokens at a time, which yield at most {n_draft + 1} tokens"
        )
