"""Owns the KV cache of the last request, for the next one that begins with the same tokens.

Requests to a chat model share its template's system prompt, and a conversation repeats all that was said before. What
was computed for those tokens still holds, so only the rest has to be prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Shorter prefixes save less than a decode step.
PREFIX_TOKENS_MIN = 8
# So many tokens are always computed anew. A single one would go through the kernels of decoding, which round otherwise
# than those of prefill, and then an answer would depend on what was asked before it.
ANEW_TOKENS_MIN = 8
# One KV cache is kept, cut to so many tokens: system prompts are rarely longer, and at 7 B parameters it takes 128 MB.
PREFIX_TOKENS_MAX = 1024


class LastPrefix:
    """At most one KV cache with the tokens it was computed from. Belongs to one loaded model."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._cache: DynamicCache | None = None

    def keep(self, tokens: Many[int], cache: DynamicCache) -> None:
        """Keep what a request that ended has computed; `tokens` are all of its tokens."""
        # Layers of other kinds (a sliding window) have forgotten tokens and cannot be cut back.
        if all(type(layer) is DynamicLayer for layer in cache.layers):
            _cut(cache, PREFIX_TOKENS_MAX)
            self._tokens, self._cache = list(tokens[: cache.get_seq_length()]), cache

    def take(self, tokens: Many[int]) -> DynamicCache | None:
        """The KV cache of a common prefix with `tokens`, which the caller owns from now on; None when there is none.

        The last ANEW_TOKENS_MIN tokens are never part of it: computing them gives the logits of the next.
        """
        length = 0
        for known, wanted in zip(self._tokens, tokens[:-ANEW_TOKENS_MIN], strict=False):
            if known != wanted:
                break
            length += 1
        if self._cache is None or length < PREFIX_TOKENS_MIN:
            return None
        cache = self._cache
        self.clear()
        _cut(cache, length)
        return cache

    def clear(self) -> None:
        self._tokens, self._cache = [], None


def _cut(cache: DynamicCache, length: int) -> None:
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)
