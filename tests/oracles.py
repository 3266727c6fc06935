"""Comparing with another engine, where rounding may decide between two tokens that are equally good."""

import torch

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
