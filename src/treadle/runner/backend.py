"""What computes a step's forward pass: plain torch or the native kernels."""

from typing import Protocol

from treadle.request import IntArray
from treadle.runner.sampler import Sampler, StepLogits
from treadle.scheduler import StepPlan


class Backend(Protocol):
    """Computes steps. Between steps it keeps no more than tensors: weights and the KV cache.

    Attributes:
        sampler: chooses tokens from its logits.
    """

    sampler: Sampler

    def move_blocks(self, plan: StepPlan) -> None:
        """Do a step's swaps and copies: out, in, then copies."""
        ...

    def forward(self, plan: StepPlan) -> None:
        """Compute all tokens of a step that is not empty, and keep their hidden states until the next.

        Tokens are numbered: first the prompts' parts, one after the other, then one per plain decode.
        """
        ...

    def logits(self, tokens: IntArray, wanted: IntArray) -> StepLogits:
        """Ask about the next token after each of some tokens of the step.

        Args:
            tokens: int32 [n], numbers of the step's tokens; one may be asked about several times.
            wanted: int32 [m], which of the n need logits, ascending; for the others the best token will do.
        """
        ...
