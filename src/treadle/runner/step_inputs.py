"""From a plan to the arrays of one forward pass: the one flattening that every backend starts from.

The tokens of a step lie one after the other, entry by entry of the plan::

    │ part of prompt A (count tokens) │ part of prompt B │ decode │ decode │ … │ beam │ … │
"""

from dataclasses import dataclass

import numpy as np

from treadle.runner.row_table import IntArray, RowTable
from treadle.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """T tokens in R runs; a run is one entry of the plan, tokens of one row at consecutive positions.

    Attributes:
        token_ids, positions, rows: int32 [T].
        run_rows, run_starts, run_counts: int32 [R]: whose a run is, where its first token lies among the T, and how
            many they are.
        num_prefills: runs that are prompts or parts of prompts; the first ones.
        block_tables: int32 [rows, max_blocks].
    """

    token_ids: IntArray
    positions: IntArray
    rows: IntArray
    run_rows: IntArray
    run_starts: IntArray
    run_counts: IntArray
    num_prefills: int
    block_tables: IntArray

    @property
    def run_ends(self) -> IntArray:
        """Number of each run's last token: int32 [R]."""
        return self.run_starts + self.run_counts - np.int32(1)


def flatten(plan: StepPlan, table: RowTable) -> StepInputs:
    """The inputs of a step that computes something.

    Args:
        plan: the step; without drafts.
        table: has taken the plan in.
    """
    rows, positions = plan.rows, plan.starts
    run_starts: IntArray = np.arange(len(rows), dtype=np.int32)
    if plan.num_prefills:
        counts = plan.counts
        np.cumsum(counts[:-1], out=run_starts[1:])
        rows = np.repeat(rows, counts)
        first = np.repeat(plan.starts - run_starts, counts)
        positions = first + np.arange(len(rows), dtype=np.int32)
    return StepInputs(
        token_ids=table.token_ids[rows, positions],
        positions=positions,
        rows=rows,
        run_rows=plan.rows,
        run_starts=run_starts,
        run_counts=plan.counts,
        num_prefills=plan.num_prefills,
        block_tables=table.block_tables,
    )
