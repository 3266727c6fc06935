"""The protocol between the engine and what executes its steps."""

from collections.abc import Container, Iterable
from typing import Protocol

import numpy as np

from treadle.core.errors import EngineError
from treadle.core.request import IntArray
from treadle.scheduler import StepPlan, StepResult


class Runner(Protocol):
    """Executes steps. What it knows of requests comes from the plans.

    Attributes:
        supports_lora: whether it computes LoRA adapters; if not, requests that use them are refused.
    """

    supports_lora: bool

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step: move blocks, write the KV of its tokens, and sample where the plan says so."""
        ...


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Raise EngineError unless `result` has the form of an answer to `plan`, so that it can be taken as a whole."""
    if not isinstance(result, StepResult):
        raise EngineError(f"the runner returned {result!r} instead of a StepResult")
    num_tokens = int(plan.samples.sum())
    if len(plan.drafts):
        accepted = _numbers("num_accepted", result.num_accepted, plan.num_decodes)
        decodes = slice(plan.num_prefills, plan.num_prefills + plan.num_decodes)
        if not ((accepted >= 1) & (accepted <= plan.counts[decodes])).all():
            raise EngineError(f"num_accepted must be from 1 to the tokens of each decode, got {accepted}")
        num_tokens += int(accepted.sum()) - plan.num_decodes
    elif result.num_accepted is not None:
        raise EngineError("the plan has no drafts, but the runner returned num_accepted")
    _numbers("token_ids", result.token_ids, num_tokens)
    asked = set() if plan.candidates is None else set(np.flatnonzero(plan.candidates).tolist())
    if result.candidates.keys() != asked:
        raise EngineError(f"entries {sorted(asked)} ask for candidates, got those of {sorted(result.candidates)}")
    _check_places("logprobs", result.logprobs, range(num_tokens))
    _check_places("prompt_logprobs", result.prompt_logprobs, range(plan.num_prefills))
    if result.errors or result.drafts:
        rows = set(plan.rows.tolist())
        _check_places("errors", [row for row, _ in result.errors], rows)
        _check_places("drafts", result.drafts, rows)


def _numbers(name: str, numbers: IntArray | None, count: int) -> IntArray:
    if not isinstance(numbers, np.ndarray) or numbers.dtype.kind != "i" or numbers.shape != (count,):
        found = f"{numbers.dtype} {list(numbers.shape)}" if isinstance(numbers, np.ndarray) else repr(numbers)
        raise EngineError(f"{name} of the result must be int32 [{count}], got {found}")
    return numbers


def _check_places(name: str, places: Iterable[int], allowed: Container[int]) -> None:
    for place in places:
        if place not in allowed:
            raise EngineError(f"{name} of the result has an entry for {place}, which is not in the step")
