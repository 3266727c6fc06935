"""Plain torch kernels, written for readability.

Shapes: T tokens of a step, H query heads, K key-value heads, G = H / K query heads that share one, D head
dimension, L tokens of context, N sequences.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalization over the last dimension (Zhang and Sennrich 2019), in float32."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of each head by their position's angles (Su et al. 2021).

    Args:
        x: [T, heads, D].
        cos, sin: [T, 1, D], the angles of the first half repeated for the second.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up, for [T, 2 × intermediate] with the gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_kv(cache: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys or values of new tokens into their slots.

    Args:
        cache: [num_slots, K × D], changed.
        values: [T, K × D].
        slots: int64 [T].
    """
    cache.index_copy_(0, slots, values)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_slots: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a run of tokens of one sequence over everything up to each of them.

    Args:
        q: [T, H, D], the last T tokens of the context.
        k_cache, v_cache: [num_slots, K × D], the run's own keys and values already stored.
        context_slots: int64 [L], slots of the whole context in order, L ≥ T.
        mask: [T, L] added to the scores: 0 where a token may attend, -inf elsewhere; None if T = L.

    Returns:
        [T, H, D].
    """
    num_tokens, num_heads, head_dim = q.shape
    num_context = context_slots.shape[0]
    num_kv_heads = k_cache.shape[1] // head_dim
    k = k_cache.index_select(0, context_slots).view(1, num_context, num_kv_heads, head_dim)
    v = v_cache.index_select(0, context_slots).view(1, num_context, num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(
        q.view(1, num_tokens, num_heads, head_dim).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=num_heads != num_kv_heads,
    )  # [1, H, T, D]
    return out[0].transpose(0, 1)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_slots: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Attention of the last token of each of N sequences over its whole context.

    Args:
        q: [N, H, D].
        k_cache, v_cache: [num_slots, K × D], the tokens' own keys and values already stored.
        context_slots: int64 [N, L], padded with slots that the sequence has written, so that no
            unwritten memory (a NaN) enters the sum with weight 0.
        mask: [N, 1, 1, L] added to the scores: 0, or -inf for padding.

    Returns:
        [N, H, D].
    """
    num_seqs, num_heads, head_dim = q.shape
    num_context = context_slots.shape[1]
    num_kv_heads = k_cache.shape[1] // head_dim
    slots = context_slots.view(-1)
    k = k_cache.index_select(0, slots).view(num_seqs, num_context, num_kv_heads, head_dim)
    v = v_cache.index_select(0, slots).view(num_seqs, num_context, num_kv_heads, head_dim)
    # The G heads of a group attend to the same keys: they take the place of the tokens of a longer query.
    out = F.scaled_dot_product_attention(
        q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
    )  # [N, K, G, D]
    return out.reshape(num_seqs, num_heads, head_dim)


def round_to_int8(x: torch.Tensor, group: int) -> torch.Tensor:
    """Round x to symmetric int8 with one scale per `group` neighbours, and back: scale × round(x / scale).

    Args:
        x: [..., n]; the last group may be shorter.
        group: how many neighbours share a scale, which is their largest magnitude / 127.
    """
    size = x.shape[-1]
    groups = F.pad(x.float(), (0, -size % group))
    groups = groups.view(*groups.shape[:-1], -1, group)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # A tensor of 127s: torch computes number / tensor as number × reciprocal, which rounds differently.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    rounded = (groups * inverse).round() * (largest / 127.0)
    return rounded.flatten(-2)[..., :size].to(x.dtype)
