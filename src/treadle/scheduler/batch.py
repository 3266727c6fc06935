"""The running sequences as rows of arrays, so that a step can process all of them with array operations.

The scheduler fills and empties rows and records the changes for the next plan. A sequence keeps its
row number while it runs; `rows` lists the used rows in rank order.
"""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from treadle.core.request import NUM_COMPUTED, NUM_COUNTERS, NUM_TOKENS, IntArray, Rank, Request, Sequence, TimeArray
from treadle.scheduler.plan import NewRow

STOP_IDS_PER_ROW = 8
"""Stop ids per row that are compared for all rows at once; a row with more stop ids is checked separately."""

NO_TOKEN = -1
"""Padding for `stop_ids`; no token has this id."""

BoolArray = npt.NDArray[np.bool_]


def rows_of(sequences: Iterable[Sequence]) -> IntArray:
    """Return the rows of running sequences: int32 [n]."""
    return np.array([seq.row for seq in sequences], dtype=np.int32)


class RunningBatch:
    """The running sequences, one per row.

    Args:
        max_num_seqs: number of rows.
        max_model_len: maximum number of tokens in a sequence.

    Attributes:
        token_ids: int32 [rows, max_model_len], valid up to num_tokens.
        num_tokens: int32 [rows], known tokens.
        num_prompt_tokens: int32 [rows], tokens of the prompt.
        num_computed_tokens: int32 [rows], tokens whose KV is written.
        token_limits: int32 [rows], value of num_tokens at which the sequence ends.
        last_token_times: float64 [rows], seconds on the engine's clock at the latest token; NaN before the first.
        is_prefilling: bool [rows], whether some tokens known at admission are not computed yet.
        is_group: bool [rows], whether the row's request has or will have several sequences.
        is_beam: bool [rows], whether the row belongs to a beam search.
        stop_ids: int32 [STOP_IDS_PER_ROW, rows], padded with NO_TOKEN.
        sequences: object [rows], the Sequence in each used row.
        num_groups: number of running requests that have or will have several sequences.
        drafts: row → int32 [k], the next tokens proposed by the runner.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.token_ids: IntArray = np.empty((max_num_seqs, max_model_len), dtype=np.int32)
        # Column-major, so that each counter is contiguous over all rows.
        self._counters: IntArray = np.zeros((max_num_seqs, NUM_COUNTERS), dtype=np.int32, order="F")
        self.num_tokens: IntArray = self._counters[:, NUM_TOKENS]
        self.num_computed_tokens: IntArray = self._counters[:, NUM_COMPUTED]
        self.num_prompt_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.token_limits: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.last_token_times: TimeArray = np.full(max_num_seqs, np.nan)
        self.is_prefilling: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.is_group: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.is_beam: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.stop_ids: IntArray = np.full((STOP_IDS_PER_ROW, max_num_seqs), NO_TOKEN, dtype=np.int32)
        self._num_stop_ids = 0  # maximum over all rows since the batch was last empty
        self.sequences: npt.NDArray[np.object_] = np.full(max_num_seqs, None, dtype=np.object_)
        self.num_groups = 0
        self.drafts: dict[int, IntArray] = {}
        # Rows filled and rows emptied since the last plan; the next plan contains both.
        self._new_rows: dict[int, None] = {}
        self._freed_rows: dict[int, None] = {}
        self._many_stop_ids: dict[int, frozenset[int]] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._num_reserved_seats = 0
        self._num_prefilling = 0
        self._num_beams = 0
        # Parallel and sorted: the key and the row of each running sequence.
        self._keys: list[tuple[Rank, int]] = []
        self._rows: IntArray = np.empty(max_num_seqs, dtype=np.int32)

    # Questions

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_free_seats(self) -> int:
        """Seats that are neither taken by a running sequence nor reserved by a running request."""
        return len(self._free_rows) - self._num_reserved_seats

    @property
    def rows(self) -> IntArray:
        """Used rows in rank order; a view, valid until a row is added or removed."""
        return self._rows[: len(self._keys)]

    @property
    def num_prefilling(self) -> int:
        """Number of rows with known tokens that are not computed yet."""
        return self._num_prefilling

    @property
    def has_beams(self) -> bool:
        """Whether a beam search is running."""
        return self._num_beams > 0

    def decoding_rows(self) -> IntArray:
        """Rows that are ready to decode, in rank order.

        The beams of a search decode together, once all of them are ready.
        """
        rows = self.rows
        if not self._num_prefilling:
            return rows.copy()
        ready = ~self.is_prefilling[rows]
        if self._num_beams:
            ready &= [not self._waits_for_beams(seq) for seq in self.sequences[rows]]
        return rows[ready]

    def _waits_for_beams(self, seq: Sequence) -> bool:
        if not seq.request.sampling_params.use_beam_search:
            return False
        return any(bool(self.is_prefilling[beam.row]) for beam in seq.request.live_sequences)

    def prefilling_sequences(self) -> list[Sequence]:
        """Sequences with known tokens that are not computed yet, in rank order."""
        if not self._num_prefilling:
            return []
        rows = self.rows
        return list(self.sequences[rows[self.is_prefilling[rows]]])

    def running_sequences(self) -> list[Sequence]:
        """All running sequences in rank order."""
        return list(self.sequences[self.rows])

    def running_requests(self) -> list[Request]:
        """All running requests in rank order."""
        return list(dict.fromkeys(seq.request for seq in self.running_sequences()))

    def rows_behind(self, rank: Rank) -> IntArray:
        """Rows strictly behind `rank`, in rank order; a view, valid until a row is added or removed."""
        return self._rows[bisect_right(self._keys, (rank, sys.maxsize)) : len(self._keys)]

    def requests_behind(self, rank: Rank) -> Iterator[Request]:
        """Running requests strictly behind `rank`, from the last to the first; valid until one of them leaves."""
        previous = None
        for place in range(len(self._keys) - 1, -1, -1):
            if self._keys[place][0] <= rank:
                return
            request: Request = self.sequences[self._rows[place]].request
            if request is not previous:
                yield request
            previous = request

    # Commands

    def add(self, seq: Sequence, token_limit: int) -> int:
        """Put `seq` into a free row, marked as ready to decode; return the row.

        Args:
            seq: a sequence that is not running.
            token_limit: number of tokens at which the sequence ends, prompt included.
        """
        row = self._free_rows.pop()
        request = seq.request
        params = request.sampling_params
        seq.bind(row, self.token_ids[row], self._counters[row], self.last_token_times[row : row + 1])
        self.num_prompt_tokens[row] = seq.num_prompt_tokens
        self.token_limits[row] = token_limit
        self.is_group[row] = params.n > 1
        self.is_beam[row] = params.use_beam_search
        self._num_beams += params.use_beam_search
        self._freed_rows.pop(row, None)
        self._new_rows[row] = None
        stop_ids = request.stop_token_ids
        self.stop_ids[:, row] = NO_TOKEN
        if len(stop_ids) <= STOP_IDS_PER_ROW:
            self.stop_ids[: len(stop_ids), row] = sorted(stop_ids)
            self._num_stop_ids = max(self._num_stop_ids if self._keys else 0, len(stop_ids))
        else:
            self._many_stop_ids[row] = stop_ids
        self.sequences[row] = seq
        self._insert_key((request.rank, seq.index), row)
        return row

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out of its row; the sequence keeps its tokens."""
        row = seq.row
        assert row is not None
        self._remove_key((seq.request.rank, seq.index))
        self.set_prefilling(row, False)
        self._num_beams -= bool(self.is_beam[row])
        self._many_stop_ids.pop(row, None)
        self.drafts.pop(row, None)
        self._new_rows.pop(row, None)
        self._freed_rows[row] = None
        self.sequences[row] = None
        seq.unbind()
        self._free_rows.append(row)

    def resend_row(self, row: int) -> None:
        """Send the whole content of `row` to the runner in the next plan, because the runner cannot know it."""
        self._new_rows[row] = None

    def resend_all_rows(self) -> None:
        """Send all rows to the runner in the next plan, because it may have applied only part of the last one."""
        self._new_rows = dict.fromkeys(self.rows.tolist())
        self._freed_rows = dict.fromkeys(self._free_rows)

    @property
    def has_changes(self) -> bool:
        """Whether rows were filled or emptied since the last `take_changes`."""
        return bool(self._new_rows or self._freed_rows)

    def take_changes(self) -> tuple[tuple[NewRow, ...], tuple[int, ...]]:
        """Return the rows filled and the rows emptied since the last call, and forget them."""
        new = tuple(self._describe_row(self.sequences[row]) for row in self._new_rows)
        freed = tuple(self._freed_rows)
        self._new_rows, self._freed_rows = {}, {}
        return new, freed

    @staticmethod
    def _describe_row(seq: Sequence) -> NewRow:
        request = seq.request
        assert seq.row is not None
        assert request.seed is not None
        return NewRow(
            row=seq.row,
            token_ids=seq.token_ids.copy(),
            num_prompt_tokens=seq.num_prompt_tokens,
            sampling_params=request.sampling_params,
            seed=request.seed,
            sequence_index=seq.index,
            stop_token_ids=request.stop_token_ids,
            grammar=None if request.grammar is None else request.grammar.text,
            adapter_id=0 if request.lora is None else request.lora.lora_int_id,
        )

    def change_rank(self, request: Request, rank: Rank) -> None:
        """Change the rank of a running request and move its rows to the new place in rank order."""
        sequences = request.live_sequences
        for seq in sequences:
            self._remove_key((request.rank, seq.index))
        request.rank = rank
        for seq in sequences:
            assert seq.row is not None
            self._insert_key((rank, seq.index), seq.row)

    def _insert_key(self, key: tuple[Rank, int], row: int) -> None:
        place = bisect_left(self._keys, key)
        self._rows[place + 1 : len(self._keys) + 1] = self._rows[place : len(self._keys)].copy()
        self._rows[place] = row
        self._keys.insert(place, key)

    def _remove_key(self, key: tuple[Rank, int]) -> None:
        place = bisect_left(self._keys, key)
        del self._keys[place]
        self._rows[place : len(self._keys)] = self._rows[place + 1 : len(self._keys) + 1].copy()

    def set_prefilling(self, row: int, is_prefilling: bool) -> None:
        """Set whether the row has known tokens to compute before it can decode."""
        self._num_prefilling += is_prefilling - bool(self.is_prefilling[row])
        self.is_prefilling[row] = is_prefilling

    def reserve_seats(self, request: Request, count: int) -> None:
        """Reserve `count` seats for the sequences that a running request will fork into."""
        self._num_reserved_seats += count - request.num_reserved_seats
        request.num_reserved_seats = count

    def append_tokens(self, rows: IntArray, token_ids: IntArray, now: float) -> BoolArray:
        """Append one token to each of `rows`.

        Args:
            rows: int32 [n], distinct; all their known tokens are computed.
            token_ids: int32 [n].
            now: seconds on the engine's clock.

        Returns:
            bool [n], whether the sequence has ended at a stop id or at its token limit.
        """
        self.last_token_times.put(rows, now)
        num_tokens = self.num_tokens.take(rows)
        self.token_ids[rows, num_tokens] = token_ids
        self.num_computed_tokens[rows] = num_tokens  # all but the new one
        num_tokens += 1
        self.num_tokens[rows] = num_tokens
        ended: BoolArray = num_tokens >= self.token_limits.take(rows)
        for stop_ids in self.stop_ids[: self._num_stop_ids]:
            ended |= stop_ids.take(rows) == token_ids
        if self._many_stop_ids:
            for i, row in enumerate(rows.tolist()):
                if int(token_ids[i]) in self._many_stop_ids.get(row, ()):
                    ended[i] = True
        return ended
