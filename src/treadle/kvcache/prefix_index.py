"""Finds blocks by their content.

The index is a tree of full blocks. An entry stands for one block's tokens after one particular entry (its
parent), so a path from the root is a prefix. A dict keyed by (parent entry, tokens, namespace) holds the entries.
It confirms a hash match by comparing the whole key, so a hash collision costs a comparison and never returns a
wrong block. Entry ids are never reused: a child of an evicted parent cannot be reached through a later entry with
the same tokens.
"""

from typing import NamedTuple

ROOT = 0
"""The parent id of a sequence's first block."""


Namespace = tuple[int, int, str] | None


class BlockKey(NamedTuple):
    """The content of a block.

    Attributes:
        parent: id of the entry before it, or ROOT.
        tokens: the block's token ids, as the bytes of an int32 array.
        namespace: (adapter id, adapter version, cache salt); requests in different namespaces never share
            blocks. None for the base model without a salt.
    """

    parent: int
    tokens: bytes
    namespace: Namespace


class Entry(NamedTuple):
    """A findable block."""

    entry_id: int
    key: BlockKey
    block: int


class PrefixIndex:
    """Block content → block id. Holds at most one entry per block.

    Attributes:
        version: increases whenever another block becomes findable.
    """

    def __init__(self) -> None:
        self._entries: dict[BlockKey, Entry] = {}
        self._entry_of_block: dict[int, Entry] = {}
        self._next_id = ROOT + 1
        self.version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: BlockKey) -> Entry | None:
        """The entry for exactly this content, or None."""
        return self._entries.get(key)

    def holds(self, block: int) -> bool:
        """Whether `block` is findable."""
        return block in self._entry_of_block

    def add(self, key: BlockKey, block: int) -> Entry:
        """Make `block` findable under `key`, and return the key's entry.

        If another block already holds the same content, that block stays and `block` is not indexed.
        """
        entry = self._entries.get(key)
        if entry is None:
            if block in self._entry_of_block:
                # Its parent was evicted, so its old entry is unreachable.
                self.remove(block)
            entry = Entry(self._next_id, key, block)
            self._next_id += 1
            self._entries[key] = entry
            self._entry_of_block[block] = entry
            self.version += 1
        return entry

    def remove(self, block: int) -> None:
        """Remove `block`, whose content is about to be overwritten."""
        entry = self._entry_of_block.pop(block)
        del self._entries[entry.key]

    def blocks(self) -> list[int]:
        """All findable blocks, for checks."""
        return list(self._entry_of_block)
