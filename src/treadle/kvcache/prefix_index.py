"""Finds blocks by what they hold.

The index is a tree of full blocks. An entry stands for one block's tokens after one particular entry (its
parent), so that a path from the root is a prefix. Entries are found through a dict keyed by (parent
entry, tokens, namespace): the dict confirms a hash match by comparing the whole key, so that two keys with
one hash cost a comparison and never give a wrong block. Entry ids are never used twice: a child of an
evicted parent cannot be reached through a later entry with the same tokens.
"""

from typing import NamedTuple

ROOT = 0
"""The parent id of first blocks."""


Namespace = tuple[int, int, str] | None


class BlockKey(NamedTuple):
    """What a block holds.

    Attributes:
        parent: id of the entry before it, or ROOT.
        tokens: the block's token ids, as the bytes of an int32 array.
        namespace: (adapter id, adapter version, cache salt); requests of different ones never share. None
            for the base model without a salt.
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
        version: grows whenever something new becomes findable.
    """

    def __init__(self) -> None:
        self._entries: dict[BlockKey, Entry] = {}
        self._entry_of_block: dict[int, Entry] = {}
        self._next_id = ROOT + 1
        self.version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: BlockKey) -> Entry | None:
        """The entry for exactly this content, if there is one."""
        return self._entries.get(key)

    def holds(self, block: int) -> bool:
        """Whether `block` can be found."""
        return block in self._entry_of_block

    def add(self, key: BlockKey, block: int) -> Entry:
        """Make `block` findable under `key`, and return the key's entry.

        If another block already holds the same content, that one stays and `block` is not indexed.
        """
        entry = self._entries.get(key)
        if entry is None:
            if block in self._entry_of_block:
                # It hangs from a parent that was evicted, so nobody can reach it there any more.
                self.remove(block)
            entry = Entry(self._next_id, key, block)
            self._next_id += 1
            self._entries[key] = entry
            self._entry_of_block[block] = entry
            self.version += 1
        return entry

    def remove(self, block: int) -> None:
        """Forget `block`, whose content is about to be overwritten."""
        entry = self._entry_of_block.pop(block)
        del self._entries[entry.key]

    def blocks(self) -> list[int]:
        """All findable blocks, for checks."""
        return list(self._entry_of_block)
