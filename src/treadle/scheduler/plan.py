"""The whole contract between scheduler and runner: a StepPlan goes in, a StepResult comes back.

Both are data: arrays and small frozen records that can be pickled, without a reference to anything that lives. A
runner that has seen nothing but the sequence of plans computes the same bits, in this process or in another.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from treadle.core.request import IntArray
from treadle.core.sampling_params import SamplingParams

Pairs = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def ones(count: int) -> IntArray:
    """Read-only ones, int32 [count]: what plain decodes compute and sample."""
    return _constant(np.ones(count, dtype=np.int32))


def _constant(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array


NO_NUMBERS = _constant(np.empty(0, dtype=np.int32))
"""int32 [0]."""


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """What a runner has to know of a row whose content it does not know yet.

    Attributes:
        row: the row's number.
        token_ids: int32 [num_tokens], all known tokens: the prompt, and what was generated after it.
        num_prompt_tokens: how many of them are the prompt.
        sampling_params: how to choose its tokens.
        seed: of the sampling noise.
        sequence_index: number of the sequence within its request; part of the sampling noise.
        stop_token_ids: every id that ends the sequence; masked before `min_tokens`.
        grammar: text of the grammar that the output has to obey, None without one.
        adapter_id: LoRA adapter, 0 for the base model.
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
    """Changes of the block tables since the last plan: block `blocks[i]` now stands at `places[i]` of `rows[i]`.

    A place that occurs several times has its last value.

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

    Entry i of the arrays says: row `rows[i]` computes `counts[i]` tokens from position `starts[i]`, then samples
    `samples[i]` tokens. Prompts and parts of prompts come first, then decodes, then beams.

    Attributes:
        step: number of the step, from 1.
        rows, starts, counts: int32 [n].
        samples: int32 [n]: 0 while a prompt is not finished, n where it forks, 1 for a decode, 0 for a beam.
        num_prefills: entries that compute tokens known at admission; the first ones.
        num_decodes: entries after those that decode; their count is 1, or 1 + the number of the row's drafts.
        candidates: int32 [n], most likely next tokens to report with their log-probabilities (beam search); None
            if no entry asks for any.
        drafts: int32 [sum of the decodes' counts - 1], proposed tokens of the decodes, one entry's after the other's.
        new_rows: rows whose content is new since the last plan, with all that they hold.
        freed_rows: rows that were emptied since the last plan.
        new_blocks: what has changed in the block tables since the last plan.
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
        """Rows that decode: int32 [num_decodes]."""
        return self.rows[self.num_prefills : self.num_prefills + self.num_decodes]

    @property
    def num_batched_tokens(self) -> int:
        """Tokens that the step computes, drafts included."""
        return int(self.counts.sum())

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens known at admission that the step computes, for the first time or again."""
        return int(self.counts[: self.num_prefills].sum())

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing."""
        return not len(self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's unmodified logits.

    Attributes:
        token_id: the token that stands there.
        logprob: its log-probability.
        rank: 1 if no token is more likely.
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
    """The runner's answer to a StepPlan, in the order of its entries.

    Attributes:
        token_ids: int32 [m], the sampled tokens: `samples[i]` for each entry i, for the request's sequences in their
            order; if the plan has drafts, `num_accepted` for each decode.
        num_accepted: int32 [num_decodes], only if the plan has drafts: how many tokens of each decode count, at
            least 1. The KV of all but the last of them is in place.
        logprobs: place in `token_ids` → log-probabilities, for rows that asked.
        candidates: entry → (token, log-probability), best first, for entries that ask for candidates.
        prompt_logprobs: entry → log-probabilities of the tokens at positions start + 1 … of the prompt, as far as
            the entry reaches, for rows that asked.
        drafts: row → int32 [k], tokens that may come next; the next plan may have them checked.
        errors: (row, why) for sequences that cannot go on.
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
        """The answer to an empty plan."""
        return StepResult(NO_NUMBERS)
