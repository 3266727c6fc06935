"""The protocol of backends: weights, KV storage, kernels and sampling behind one `open`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from treadle.backends.inputs import Rows, StepInputs
from treadle.core.request import IntArray
from treadle.models.loaders.base import WeightSource
from treadle.models.spec import ModelSpec
from treadle.scheduler.plan import BlockMoves, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """The user's settings that concern backends; EngineConfig describes their values.

    Attributes:
        device, dtype, quantization, kv_cache_dtype, cpu_kernels, num_threads: as in EngineConfig.
        block_size: slots of a KV block.
        max_model_len: maximum number of tokens of one sequence.
    """

    device: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    cpu_kernels: str
    num_threads: int | None
    block_size: int
    max_model_len: int

    @property
    def int8_weights(self) -> bool:
        """Whether weights are int8."""
        return self.quantization == "int8"

    @property
    def may_use_stored(self) -> bool:
        """Whether a quantized file is computed from what it stores, on a backend that can."""
        return self.quantization in (None, "auto") and self.dtype == "auto"

    @property
    def int8_kv(self) -> bool:
        """Whether keys and values are int8."""
        return self.kv_cache_dtype == "int8" or (self.kv_cache_dtype == "auto" and self.int8_weights)


def describe_numbers(weights: str, *, kv: str) -> str:
    """The number formats of a backend in words, such as "int8 with bfloat16 KV"."""
    return weights if weights == kv else f"{weights} with {kv} KV"


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The model's predictions of the next token at some places of a step.

    Attributes:
        values: float32 [m, V], logits, at least of the places for which they were requested.
        place: int32 [n], row of `values` for each place, -1 for places without logits.
        best: int32 [n], the most likely token of each place.
    """

    values: torch.Tensor
    place: IntArray
    best: IntArray


class SamplingKernels(Protocol):
    """The sampler's operations on whole rows of logits. `place` gives the row of `values` of each entry."""

    def draw(
        self,
        values: torch.Tensor,
        place: IntArray,
        table: Rows,
        rows: IntArray,
        noise: npt.NDArray[np.float64],
    ) -> IntArray:
        """A token for each entry: int32 [n].

        A greedy row takes the most likely one. For the others the draw inverts the cumulative distribution
        over token ids, so that equal logits and equal noise give the same token.

        Args:
            values: float32 [.., V].
            place: int32 [n].
            table, rows: the rows whose parameters apply, int32 [n].
            noise: float64 [n], in [0, 1).
        """
        ...

    def report(
        self, values: torch.Tensor, place: IntArray, token_ids: IntArray, num_top: IntArray
    ) -> list[TokenLogprobs]:
        """Log-probability and rank of a token, and the most likely ones, for each entry.

        Args:
            values: float32 [.., V].
            place, token_ids: int32 [n].
            num_top: int32 [n], how many of the most likely tokens.
        """
        ...

    def penalize(self, values: torch.Tensor, place: IntArray, table: Rows, rows: IntArray) -> None:
        """Apply the rows' repetition, presence and frequency penalties to their logits, in place."""
        ...


class Backend(Protocol):
    """Computes steps. Between steps it keeps only tensors: weights and the KV cache.

    Attributes:
        device: where it computes.
        block_size: slots of a KV block.
        block_bytes: bytes of a KV block, over all layers.
        num_threads: number of CPU threads.
        sampling_kernels: operations on its logits.
    """

    device: torch.device
    block_size: int
    block_bytes: int
    num_threads: int
    sampling_kernels: SamplingKernels

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate the two tiers of KV blocks; called once, before the first step."""
        ...

    def move_blocks(self, moves: BlockMoves) -> None:
        """Carry out a step's swaps and copies, in this order: out, in, copies."""
        ...

    def forward(self, inputs: StepInputs) -> None:
        """Compute all tokens of a step, and keep their hidden states until the next step."""
        ...

    def logits(self, tokens: IntArray, wanted: IntArray) -> StepLogits:
        """Predict the next token after each of `tokens`.

        Args:
            tokens: int32 [n], indices among the step's tokens; an index may occur several times.
            wanted: int32 [m], which of the n need logits, ascending; the others need only the best token.
        """
        ...


class BackendRoom(Protocol):
    """A package that makes backends. Rooms are tried in order; the first one without an objection is opened."""

    def why_not(self, spec: ModelSpec, settings: BackendSettings) -> str | None:
        """Why this room cannot compute the model with these settings; None if it can.

        Raises:
            ConfigError: the user has requested this room explicitly, and it cannot be used.
        """
        ...

    def open(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        settings: BackendSettings,
        on_progress: Callable[[float], None] = ...,
    ) -> Backend:
        """Read the weights, and return a backend that is ready to allocate.

        Args:
            spec: of the model.
            weights: its weights.
            settings: for which `why_not` returned None.
            on_progress: called with a number from 0 to 1 while weights are read.
        """
        ...
