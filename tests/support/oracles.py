"""Comparing with another engine, where rounding may decide between two tokens that are equally good."""

import numpy as np
import torch

from treadle.runner.noise import uniform

TIE = 2e-3
"""Logits closer than this are a tie: the two engines' errors are within 1e-3 each."""


@torch.inference_mode()
def reference_logits(model, token_ids) -> torch.Tensor:
    """Logits of another engine's model at every position: [len, V]."""
    return model(torch.tensor([list(token_ids)])).logits[0].float()


def assert_greedy(model, prompt, output, *, eos_ids=frozenset(), max_tokens=None):
    """Every token of `output` is the most likely one after those before it, by `model`, or ties with it.

    This is checked along `output` itself, so that after a tie either way is followed to its end.
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
    """Equal outputs; where they part, the two tokens tie by `model`."""
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip([*ours, None], [*theirs, None], strict=False)) if a != b)
    row = reference_logits(model, [*prompt, *ours[:at]])[-1]
    a, b = row[ours[at]], row[theirs[at]]
    assert abs(float(a - b)) < TIE, f"they part at token {at}: {ours[at]} ({a}) and {theirs[at]} ({b})"


def assert_same_draws(model, prompt, ours, theirs, params, index):
    """Equal outputs of seeded sampling; where they part, the noise lies on the edge between the two tokens."""
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
