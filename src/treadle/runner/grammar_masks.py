"""Structured outputs: tokens that would break a sequence's grammar get no probability."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from treadle.core.request import IntArray
from treadle.runner.row_table import RowTable
from treadle.text.grammar import Grammar, Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor


RowErrors = tuple[tuple[int, str], ...]
"""(row, why) for sequences that cannot go on."""


class GrammarMasks:
    """Computes in parallel which tokens may come next, for all sequences of a step that have a grammar.

    Args:
        find_grammar: text of a grammar → the compiled grammar.
        threads: number of threads.
    """

    def __init__(self, find_grammar: Callable[[str], Grammar], threads: int) -> None:
        self._find_grammar = find_grammar
        self._threads = threads
        self._executor: LLExecutor | None = None

    @torch.inference_mode()
    def apply(self, values: torch.Tensor, place: IntArray, table: RowTable, rows: IntArray) -> RowErrors:
        """Set the logits of forbidden tokens to -inf, in place.

        Args:
            values: float32 [.., V].
            place: int32 [n], row of `values` for each entry.
            table, rows: the row of each entry, int32 [n]; a row may occur several times.

        Returns:
            The rows whose grammar turned out to be too complex to follow, each once.
        """
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        vocab_size = values.shape[1]
        distinct, which = np.unique(rows, return_inverse=True)
        matchers = [self._matcher(table, row) for row in distinct.tolist()]
        masks = allocate_token_bitmask(len(matchers), vocab_size)
        fill_next_token_bitmask_par(self._executor, [(m.backend, i) for i, m in enumerate(matchers)], masks)
        errors = []
        for row, matcher in zip(distinct.tolist(), matchers, strict=True):
            if (error := matcher.error) is not None:
                table.matchers[row] = None  # it cannot be used again
                errors.append((row, f"structured_outputs: {error}"))
        allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=vocab_size)
        forbidden = torch.from_numpy(allowed == 0).to(values.device)
        for i, k in zip(place.tolist(), which.tolist(), strict=True):
            values[i].masked_fill_(forbidden[k], -torch.inf)
        return tuple(errors)

    def _matcher(self, table: RowTable, row: int) -> Matcher:
        """The row's matcher, moved to the end of the row's output."""
        if table.matchers[row] is None:
            text = table.grammars[row]
            assert text is not None
            table.matchers[row] = self._find_grammar(text).matcher()
        matcher: Matcher = table.matchers[row]
        matcher.follow(table.token_ids[row, table.num_prompt_tokens[row] : table.num_tokens[row]].tolist())
        return matcher
