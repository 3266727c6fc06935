"""The contract between scheduler and runner: the runner takes a StepPlan and returns a StepResult.

Both are plain data, arrays and small frozen records that can be pickled, with no reference to a live object. The
sequence of plans is all that a runner needs to compute the same bits, in this process or in another one.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from treadle.core.request import IntArray
from treadle.core.sampling_params import SamplingParams

Pairs = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def ones(count: int) -> IntArray:
    """Return read-only ones, int32 [count]: the number of tokens that each plain decode computes and samples."""
    return _constant(np.ones(count, dtype=np.int32))


def _constant(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array


NO_NUMBERS = _constant(np.empty(0, dtype=np.int32))
"""An empty read-only array, int32 [0]."""


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """The content of a row that the runner does not know yet.

    Attributes:
        row: row number.
        token_ids: int32 [num_tokens], all known tokens: the prompt and the output so far.
        num_prompt_tokens: length of the prompt in tokens.
        sampling_params: the request's sampling parameters.
        seed: seed of the sampling noise.
        sequence_index: index of the sequence in its request; the sampling noise depends on it.
        stop_token_ids: ids of the tokens that end the sequence; masked before `min_tokens`.
        grammar: text of the grammar that constrains the output; None without one.
        adapter_id: id of the LoRA adapter; 0 for the base model.
    """

    row: int
    token_ids: IntArray
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    sequence_index: int
    stop_token_ids: frozenset[int]
    grammar: str | None
    adapter_id: int


@dataclass(frozen=True, slots=True, eq=False)
class NewBlocks:
    """Changes to the block tables since the last plan: entry `places[i]` of row `rows[i]` is now `blocks[i]`.

    If a place occurs several times, the last value counts.

    Attributes:
        rows, places, blocks: int32 [n].
    """

    rows: IntArray
    places: IntArray
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Copies of blocks, all done before the forward pass, in this order.

    Attributes:
        swap_out: (device block, host block).
        swap_in: (host block, device block).
        copy: (device block, device block).
    """

    swap_out: Pairs = ()
    swap_in: Pairs = ()
    copy: Pairs = ()


NO_NEW_BLOCKS = NewBlocks(NO_NUMBERS, NO_NUMBERS, NO_NUMBERS)
NO_MOVES = BlockMoves()


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What one step runs.

    Entry i: row `rows[i]` computes `counts[i]` tokens from position `starts[i]`, then samples `samples[i]` tokens.
    Prefills (prompts and chunks of prompts) come first, then decodes, then beams.

    Attributes:
        step: number of the step, from 1.
        rows, starts, counts: int32 [n].
        samples: int32 [n]: 0 for an unfinished prompt, n for a prompt that forks, 1 for a decode, 0 for a beam.
        num_prefills: number of entries that compute tokens known at admission; these come first.
        num_decodes: number of decodes, which follow; each has a count of 1 plus the number of its drafted tokens.
        candidates: int32 [n], number of most likely next tokens to report with their log-probabilities (beam
            search); None if no entry needs any.
        drafts: int32 [sum of (count - 1) over the decodes], the drafted tokens of the decodes, concatenated.
        new_rows: content of the rows that were filled since the last plan.
        freed_rows: rows that were emptied since the last plan.
        new_blocks: changes to the block tables since the last plan.
        moves: copies of blocks, done before the forward pass.
    """

    step: int
    rows: IntArray
    starts: IntArray
    counts: IntArray
    samples: IntArray
    num_prefills: int = 0
    num_decodes: int = 0
    candidates: IntArray | None = None
    drafts: IntArray = field(default_factory=lambda: NO_NUMBERS)
    new_rows: tuple[NewRow, ...] = ()
    freed_rows: tuple[int, ...] = ()
    new_blocks: NewBlocks = NO_NEW_BLOCKS
    moves: BlockMoves = NO_MOVES

    @property
    def decode_rows(self) -> IntArray:
        """Rows of the decodes: int32 [num_decodes]."""
        return self.rows[self.num_prefills : self.num_prefills + self.num_decodes]

    @property
    def num_batched_tokens(self) -> int:
        """Number of tokens that the step computes, drafts included."""
        return int(self.counts.sum())

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens known at admission that the step computes, for the first time or again."""
        return int(self.counts[: self.num_prefills].sum())

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing."""
        return not len(self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's unmodified logits.

    Attributes:
        token_id: the token at the position.
        logprob: its log-probability.
        rank: 1 plus the number of tokens that are more likely.
        top_token_ids: the most likely tokens, best first.
        top_logprobs: their log-probabilities.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The runner's answer to a StepPlan, in the order of the plan's entries.

    Attributes:
        token_ids: int32 [m], the sampled tokens: `samples[i]` tokens for entry i, one for each sequence of the
            request in order; if the plan has drafts, `num_accepted` tokens for each decode.
        num_accepted: int32 [num_decodes], number of accepted tokens of each decode, at least 1; None if the plan has
            no drafts. The KV of all accepted tokens but the last is written.
        logprobs: index into `token_ids` → log-probabilities, for rows that request them.
        candidates: entry → (token, log-probability), best first, for entries that need candidates.
        prompt_logprobs: entry → log-probabilities of the prompt tokens from position start + 1 to the end of the
            entry, for rows that request them.
        drafts: row → int32 [k], drafted next tokens; the next plan may include them for verification.
        errors: (row, message) for sequences that cannot continue.
    """

    token_ids: IntArray
    num_accepted: IntArray | None = None
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    drafts: dict[int, IntArray] = field(default_factory=dict)
    errors: tuple[tuple[int, str], ...] = ()

    @staticmethod
    def nothing() -> "StepResult":
        """Return the answer to an empty plan."""
        return StepResult(NO_NUMBERS)
