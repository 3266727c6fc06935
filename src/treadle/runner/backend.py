"""What computes a step's forward pass: plain torch or the native kernels."""

from typing import Protocol

from treadle.runner.row_table import IntArray
from treadle.runner.sampler import SamplingKernels, StepLogits
from treadle.runner.step_inputs import StepInputs
from treadle.scheduler.plan import BlockMoves


class Backend(Protocol):
    """Computes steps. Between steps it keeps no more than tensors: weights and the KV cache.

    Attributes:
        block_size: slots of a block.
        num_threads: how many threads compute on the CPU.
        sampling_kernels: work on its logits.
    """

    block_size: int
    num_threads: int
    sampling_kernels: SamplingKernels

    def move_blocks(self, moves: BlockMoves) -> None:
        """Do a step's swaps and copies: out, in, then copies."""
        ...

    def forward(self, inputs: StepInputs) -> None:
        """Compute all tokens of a step, and keep their hidden states until the next."""
        ...

    def logits(self, tokens: IntArray, wanted: IntArray) -> StepLogits:
        """Ask about the next token after each of some tokens of the step.

        Args:
            tokens: int32 [n], numbers of the step's tokens; one may be asked about several times.
            wanted: int32 [m], which of the n need logits, ascending; for the others the best token will do.
        """
        ...
