"""Turns a plan into the flat arrays of one forward pass, from which every backend starts.

The tokens of a step are consecutive, in the order of the plan's entries::

    │ part of prompt A (count tokens) │ part of prompt B │ decode │ decode │ … │ beam │ … │
"""

import numpy as np

from treadle.backends.inputs import StepInputs
from treadle.core.request import IntArray
from treadle.runner.row_table import RowTable
from treadle.scheduler.plan import StepPlan


def flatten(plan: StepPlan, table: RowTable) -> StepInputs:
    """The inputs of a step that computes something.

    Args:
        plan: the step; without drafts.
        table: the rows, after `RowTable.take(plan)`.
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
