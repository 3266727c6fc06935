"""Turns a step's flat arrays into the tensors of one forward pass in torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from treadle.backends.inputs import StepInputs

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A run of tokens of one sequence.

    Attributes:
        start, end: its range among the step's tokens.
        context_slots: int64 [L], slots of the sequence's tokens up to the last one of the run.
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
        tokens: int64 [N], indices of their tokens among the step's.
        context_slots: int64 [N, L], slots of their contexts, padded with the sequence's first slot.
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
        prefills, decodes: the pieces in which attention is computed.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    prefills: tuple[PrefillInputs, ...]
    decodes: tuple[DecodeInputs, ...]


def make_batch_inputs(inputs: StepInputs, block_size: int, dtype: torch.dtype, device: torch.device) -> BatchInputs:
    """Build the tensors of a step.

    Args:
        inputs: the step.
        block_size: slots of a block.
        dtype: of the attention masks.
        device: where the tensors go.
    """
    positions = inputs.positions.astype(np.int64)
    blocks = inputs.block_tables[inputs.rows, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    return BatchInputs(
        token_ids=_to(inputs.token_ids.astype(np.int64), device),
        positions=_to(positions, device),
        slots=_to(slots, device),
        prefills=tuple(_prefill(inputs, run, block_size, dtype, device) for run in range(inputs.num_prefills)),
        decodes=tuple(_decodes(inputs, block_size, dtype, device)),
    )


def _prefill(
    inputs: StepInputs, run: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> PrefillInputs:
    start, count = int(inputs.run_starts[run]), int(inputs.run_counts[run])
    first = int(inputs.positions[start])
    context = np.arange(first + count)
    slots = _slots_of(inputs.block_tables[inputs.run_rows[run]], context, block_size)
    mask = None
    if first > 0:
        visible = context[None, :] <= np.arange(first, first + count)[:, None]
        mask = _additive_mask(visible, dtype, device)
    return PrefillInputs(start, start + count, _to(slots, device), mask)


def _decodes(inputs: StepInputs, block_size: int, dtype: torch.dtype, device: torch.device) -> list[DecodeInputs]:
    """Decodes in groups of similar length: in one group, a long context would pad all others to its length."""
    rows = inputs.run_rows[inputs.num_prefills :]
    if not len(rows):
        return []
    tokens = inputs.run_starts[inputs.num_prefills :].astype(np.int64)
    lengths = inputs.positions[tokens].astype(np.int64) + 1
    # Groups by the power of two above the length.
    classes = np.ceil(np.log2(np.maximum(lengths, 64)))
    groups = []
    for size_class in np.unique(classes):
        members = np.flatnonzero(classes == size_class)
        longest = int(lengths[members].max())
        context = np.arange(longest)[None, :]
        visible = context < lengths[members][:, None]
        # Padding refers to position 0, which is always written.
        slots = _slots_of(inputs.block_tables[rows[members]], np.where(visible, context, 0), block_size)
        mask = _additive_mask(visible[:, None, None, :], dtype, device)
        groups.append(DecodeInputs(_to(tokens[members], device), _to(slots, device), mask))
    return groups


def _slots_of(tables: npt.NDArray[np.int32], positions: LongArray, block_size: int) -> LongArray:
    """Slots of `positions`, given block tables of the same leading shape."""
    blocks = np.take_along_axis(tables, positions // block_size, axis=-1)
    return blocks.astype(np.int64) * block_size + positions % block_size


def _additive_mask(visible: npt.NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    return torch.from_numpy(mask).to(device=device, dtype=dtype)


def _to(array: LongArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
