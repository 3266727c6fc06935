"""Tables of the rotary embedding's angles."""

import math

import torch

from treadle.models.spec import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position for each pair of dimensions: float32 [head_dim / 2].

    "llama3" divides the frequencies whose wavelength exceeds the original context over `low_freq_factor` by
    `factor`, keeps those below the original context over `high_freq_factor`, and interpolates in between (Llama 3.1's
    reference code).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        original = rope.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies


def rotary_tables(
    rope: RopeConfig, head_dim: int, max_model_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for all positions: two of [max_model_len, head_dim] in `dtype`."""
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
