"""From a StepPlan and the rows' arrays to the tensors of one forward pass.

The tokens of a step lie one after the other: first the prompts' parts, then one token per plain decode::

    │ part of prompt A (count tokens) │ part of prompt B │ decode │ decode │ … │
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from treadle.scheduler import ScheduledSequence, StepPlan

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A run of tokens of one sequence.

    Attributes:
        start, end: where its tokens lie among the step's.
        context_slots: int64 [L], of the sequence's tokens up to the last one of the run.
        mask: [end - start, L], 0 or -inf; None if the run starts at position 0.
    """

    start: int
    end: int
    context_slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Decodes with contexts of similar length.

    Attributes:
        tokens: int64 [N], where their tokens lie among the step's.
        context_slots: int64 [N, L], padded with the sequence's first slot.
        mask: [N, 1, 1, L], 0 or -inf.
    """

    tokens: torch.Tensor
    context_slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The tensors of one forward pass of T tokens.

    Attributes:
        token_ids, positions, slots: int64 [T].
        prefills, decodes: how attention goes over the tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    prefills: tuple[PrefillInputs, ...]
    decodes: tuple[DecodeInputs, ...]


def make_batch_inputs(plan: StepPlan, block_size: int, dtype: torch.dtype, device: torch.device) -> BatchInputs:
    """Build the inputs of a step.

    Args:
        plan: the step; rows' arrays are read through it.
        block_size: slots of a block.
        dtype: of the attention masks.
        device: where the tensors go.
    """
    batch, tables = plan.batch, plan.block_tables
    rows = np.concatenate(
        [np.repeat([s.row for s in plan.sequences], [s.count for s in plan.sequences]), plan.decode_rows]
    ).astype(np.int64)
    positions = np.concatenate(
        [np.arange(s.start, s.start + s.count) for s in plan.sequences]
        + [batch.num_computed_tokens[plan.decode_rows]]
    ).astype(np.int64)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    prefills = []
    start = 0
    for s in plan.sequences:
        prefills.append(_prefill(s, start, plan, block_size, dtype, device))
        start += s.count
    return BatchInputs(
        token_ids=_to(batch.token_ids[rows, positions].astype(np.int64), device),
        positions=_to(positions, device),
        slots=_to(slots, device),
        prefills=tuple(prefills),
        decodes=tuple(_decodes(plan, start, block_size, dtype, device)),
    )


def _prefill(
    s: ScheduledSequence,
    start: int,
    plan: StepPlan,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PrefillInputs:
    context = np.arange(s.start + s.count)
    slots = _slots_of(plan.block_tables[s.row], context, block_size)
    mask = None
    if s.start > 0:
        visible = context[None, :] <= np.arange(s.start, s.start + s.count)[:, None]
        mask = _additive_mask(visible, dtype, device)
    return PrefillInputs(start, start + s.count, _to(slots, device), mask)


def _decodes(
    plan: StepPlan, first_token: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[DecodeInputs]:
    """Decodes in groups: one padded context for all would let a single long one cost as much for each."""
    rows = plan.decode_rows
    if not len(rows):
        return []
    lengths = plan.batch.num_computed_tokens[rows].astype(np.int64) + 1
    # Groups by the power of two above the length.
    classes = np.ceil(np.log2(np.maximum(lengths, 64)))
    groups = []
    for size_class in np.unique(classes):
        members = np.flatnonzero(classes == size_class)
        longest = int(lengths[members].max())
        context = np.arange(longest)[None, :]
        visible = context < lengths[members][:, None]
        # Padding looks at position 0, which is always written.
        slots = _slots_of(plan.block_tables[rows[members]], np.where(visible, context, 0), block_size)
        mask = _additive_mask(visible[:, None, None, :], dtype, device)
        groups.append(DecodeInputs(_to(members + first_token, device), _to(slots, device), mask))
    return groups


def _slots_of(tables: npt.NDArray[np.int32], positions: LongArray, block_size: int) -> LongArray:
    """Slots of positions, by block tables of the same leading shape."""
    blocks = np.take_along_axis(tables, positions // block_size, axis=-1)
    return blocks.astype(np.int64) * block_size + positions % block_size


def _additive_mask(visible: npt.NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    return torch.from_numpy(mask).to(device=device, dtype=dtype)


def _to(array: LongArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
