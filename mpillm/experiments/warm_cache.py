"""Warnings that a server has the prompts of an earlier test in its prefix cache: figures are then too good.

A second test with the same prompts can show 2.3 times the throughput (vLLM's issue 54227).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from mpillm.options.run_config import RunConfig
from mpillm.report.run_files import SERVERS

_MIN_SHARE = 0.01  # a smaller share of cached prompt tokens, such as that of a chat template, changes nothing


def warning(share: float | None, *, random_prompts: bool, of_run: bool = True) -> str:
    """Return the warning and its remedies; "" if the server had no prompts in its cache.

    Args:
        share: Cached share of the prompt tokens, as the server reports; None: it does not.
        random_prompts: Another seed gives other prompts.
        of_run: The options are those of `run`.
    """
    if share is not None and share < _MIN_SHARE:
        return ""
    cached = "the server may have prompts of earlier requests in its prefix cache, and does not report this"
    if share is not None:
        cached = f"the server had {100 * share:.0f} % of the prompt tokens in its prefix cache"
    remedies = ["--cache_salt test"]
    remedies += ["another --seed"] if random_prompts else []
    remedies += ["--reset_prefix_cache"] if of_run else []
    text = " or ".join(filter(None, [", ".join(remedies[:-1]), remedies[-1]]))
    return f"{cached}; new prompts take longer: to measure these, use {text}"


def cached_share(result: Mapping[str, Any]) -> float | None:
    """Return the share of a test's prompt tokens that servers had in their caches; None if unknown.

    In a test of conversations, first turns count: later ones find the beginning of their own conversation.
    """
    first_turns = (result.get("conversations") or {}).get("first_turns") or {}
    if (share := first_turns.get("cached_share")) is not None:
        return float(share)
    clients = [one for one in result.get("per_instance") or () if "server_cached_tokens" in one]
    cached, prompts = (
        sum(one.get(f"server_{name}_tokens") or 0 for one in clients) for name in ("cached", "prompt")
    )
    return cached / prompts if prompts else None


class RepeatedPrompts:
    """Finds the first test of a series that sends the prompts of an earlier one to a server that stays up."""

    def __init__(self) -> None:
        self._sent: set[Hashable] = set()
        self.text = ""
        """The warning of this series, once there is one."""

    def warning(self, config: RunConfig, result: Mapping[str, Any] | None) -> str:
        """Return the warning after a test, once in a series; "" if there is none.

        `result`: the test's; None if it was stopped, so that only its prompts count.
        """
        prompts = _prompts_of(config)
        is_repeated = prompts in self._sent
        self._sent.add(prompts)
        if prompts is None or not is_repeated or self.text or result is None:
            return ""
        self.text = warning(cached_share(result), random_prompts=_are_random(config))
        return self.text


def _are_random(config: RunConfig) -> bool:
    return not (config.dataset_path or config.benchmarks)


def _prompts_of(config: RunConfig) -> Hashable:
    """Return the servers of a test and what determines its prompts; None if no server can know them."""
    servers = [url for name in SERVERS for url in getattr(config, name) or ()]
    if not servers or config.cache_salt or config.reset_prefix_cache:
        return None
    data = (config.dataset_path, *(config.benchmarks or ()))
    return (*map(str, servers), *map(str, data), config.seed if _are_random(config) else None)
