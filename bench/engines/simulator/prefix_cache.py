"""Prefix cache: which prompts' beginnings are still in the KV pool, as a radix cache would know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Prefixes by hash, in blocks; the least recently used go first.

    Args:
        block_tokens: a prefix is found again at multiples of this; 0 switches the cache off.
        capacity_tokens: of the pool (and of the hierarchical cache behind it).
    """

    def __init__(self, block_tokens: int, capacity_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_tokens // block_tokens if block_tokens else 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def keys(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """One key for each whole block of a prompt; equal keys mean equal prefixes up to there."""
        if not self.block_tokens:
            return ()
        key, keys = 0, []
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            key = hash((key, *tokens[start : start + self.block_tokens]))
            keys.append(key)
        return tuple(keys)

    def match(self, keys: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of a prompt that need not be computed; its last token always is."""
        found = 0
        for key in keys:
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            found += 1
        return min(found * self.block_tokens, max(0, (prompt_tokens - 1) // self.block_tokens * self.block_tokens))

    def insert(self, keys: Sequence[int], used_tokens: int) -> None:
        """Keep a computed prompt, and as much of the older ones as running requests leave room for."""
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        room = self.capacity_blocks - used_tokens // self.block_tokens if self.block_tokens else 0
        while len(self._blocks) > max(0, room):
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
