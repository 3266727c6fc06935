"""Comparisons with another engine, in which rounding may break a tie between two tokens either way."""

import numpy as np
import torch

from treadle.runner.noise import uniform

TIE = 2e-3
"""Two logits closer than this count as a tie: the error of each engine is at most 1e-3."""


@torch.inference_mode()
def reference_logits(model, token_ids) -> torch.Tensor:
    """Return the logits of the reference model at every position: [len, V]."""
    return model(torch.tensor([list(token_ids)])).logits[0].float()


def assert_greedy(model, prompt, output, *, eos_ids=frozenset(), max_tokens=None):
    """Assert that every token of `output` is the most likely one for `model` after the tokens before it, or ties.

    The check follows `output` itself, so that it stays valid after a tie.
    """
    logits = reference_logits(model, [*prompt, *output])
    for i, token in enumerate(output):
        row = logits[len(prompt) + i - 1]
        gap = float(row.max() - row[token])
        assert gap < TIE, f"token {i} ({token}) is {gap} below the best ({int(row.argmax())})"
    if output and output[-1] not in eos_ids and max_tokens is not None:
        assert len(output) == max_tokens
    assert not set(output[:-1]) & eos_ids


def assert_same_tokens(model, prompt, ours, theirs):
    """Assert that the outputs are equal, or that the first two tokens that differ tie for `model`."""
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip([*ours, None], [*theirs, None], strict=False)) if a != b)
    row = reference_logits(model, [*prompt, *ours[:at]])[-1]
    a, b = row[ours[at]], row[theirs[at]]
    assert abs(float(a - b)) < TIE, f"they differ at token {at}: {ours[at]} ({a}) and {theirs[at]} ({b})"


def assert_same_draws(model, prompt, ours, theirs, params, index):
    """Assert that seeded outputs are equal, or that the noise lies on the boundary of the first two that differ."""
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    row = reference_logits(model, [*prompt, *ours[:at]])[-1] / params.temperature
    ends = row.double().softmax(-1).cumsum(-1)
    noise = uniform(
        np.array([params.seed], dtype=np.uint64), np.array([index], dtype=np.int32), np.array([at], dtype=np.int64)
    )[0]
    for token in (ours[at], theirs[at]):
        start, end = float(ends[token - 1]) if token else 0.0, float(ends[token])
        assert start - 1e-5 < noise < end + 1e-5, f"token {at}: {noise} is not near [{start}, {end})"
