"""Every native kernel, compared with plain torch on random shapes, on every build that this machine supports."""

from ctypes import byref

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from support.examples import examples
from support.native import RUNNABLE, native_library, native_ops
from treadle.backends.cpu.arena import round_up
from treadle.backends.cpu.library import (
    BLOCK_FORMATS,
    BLOCK_GROUP,
    CELL,
    FORMATS,
    GROUP,
    NARROWINGS,
    PANEL,
    WeightsStruct,
    kv_cache_struct,
    pointer,
)
from treadle.backends.torch import reference

FAST = examples(40)


@pytest.fixture(params=RUNNABLE or [None], scope="module")
def library(request):
    return native_library(request.param)


def rng_of(seed):
    return np.random.default_rng(seed)


def normal(rng, *shape):
    return rng.normal(0, 1, shape).astype(np.float32)


def bf16(array):
    return torch.from_numpy(array).bfloat16().float()


class Packed:
    """A matrix in the layout of the kernels; owns the memory.

    Args:
        weight: float32 [n, k]; for a block format it is quantized by the gguf package, and replaced by what it became.
        form: one of FORMATS.
    """

    def __init__(self, library, weight, form, bias=None):
        source, self.weight = weight, weight
        if form in BLOCK_FORMATS:
            source = to_blocks(weight, form)
            self.weight = gguf.quants.dequantize(source, gguf.GGMLQuantizationType[form])
        n, k = round_up(weight.shape[0], PANEL), round_up(weight.shape[1], GROUP)
        self.data = np.zeros(library.matrix_bytes(form, *weight.shape) + 64, dtype=np.uint8)
        self.data[-64:] = 7
        assert library.pack(form, source, *weight.shape, self.data[:-64], threads=2) == 0
        assert (self.data[-64:] == 7).all()
        self.bias = None
        if bias is not None:
            self.bias = np.zeros(n, dtype=np.float32)
            self.bias[: len(bias)] = bias
        self.n, self.k, self.form = n, k, form
        self.struct = WeightsStruct(pointer(self.data), pointer(self.bias), n, k, FORMATS.index(form))


def to_blocks(weight, form):
    """Blocks of GGUF that stand for `weight`, roughly in the K formats, which the gguf package cannot write."""
    kind = gguf.GGMLQuantizationType[form]
    if not form.endswith("_K"):
        return gguf.quants.quantize(weight, kind)
    blocks = rng_of(weight.size).integers(
        0, 256, (len(weight), gguf.quant_shape_to_byte_shape(weight.shape, kind)[1])
    )
    per_row = weight.shape[1] // 256
    blocks = blocks.astype(np.uint8).reshape(len(weight), per_row, -1)
    halves = rng_of(weight.size + 1).uniform(1e-4, 2e-3, (len(weight), per_row, 2)).astype(np.float16).view(np.uint8)
    if form == "Q6_K":
        blocks[..., -2:] = halves[..., :2]
    else:
        blocks[..., :4] = halves
    return np.ascontiguousarray(blocks.reshape(len(weight), -1))


def padded_columns(form, k):
    """The smallest number of columns from k on that the format can have."""
    return k if form in ("BF16", "INT8") else round_up(k, 256 if form.endswith("_K") else 32)


def linear(library, packed, x, *, threads=1):
    out = np.full((len(x), packed.n), np.nan, dtype=np.float32)
    sizes = x.shape[0], x.shape[1], pointer(out), threads
    native_ops(library.build).treadle_op_linear(byref(packed.struct), pointer(x), *sizes)
    return torch.from_numpy(out)


def rounded(library, packed, x):
    """The activations as the kernels narrow them, and the weights as they are computed with: float64."""
    x, weight = torch.from_numpy(x), torch.from_numpy(packed.weight)
    if packed.form == "INT8":
        x, weight = reference.round_to_int8(x, GROUP), reference.round_to_int8(weight, weight.shape[1])
    elif packed.form == "BF16":
        # Without BF16 instructions, activations stay float32.
        x, weight = x.bfloat16() if library.build == "avx512_bf16" else x, weight.bfloat16()
    else:
        x = reference.round_to_int8(x, BLOCK_GROUP)
    return x.double(), weight.double()


def torch_linear(library, packed, x, bias=None):
    return F.linear(*rounded(library, packed, x), None if bias is None else torch.from_numpy(bias).double())


def assert_close(ours, expected, tolerance, floor=1e-6):
    """Assert that errors are at most `tolerance` times the largest value, or times `floor` if that is larger."""
    scale = max(float(expected.abs().max()), floor)
    assert float((ours.double() - expected.double()).abs().max()) <= tolerance * scale


@examples(100)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 20),
    n=st.integers(1, 150),
    k=st.integers(1, 600),
    form=st.sampled_from(FORMATS),
    has_bias=st.booleans(),
)
def test_linear_equals_torch(library, seed, rows, n, k, form, has_bias):
    rng = rng_of(seed)
    k = padded_columns(form, k)
    x, weight = normal(rng, rows, k), normal(rng, n, k)
    bias = normal(rng, n) if has_bias else None
    packed = Packed(library, weight, form, bias)
    out = linear(library, packed, x, threads=1 + seed % 3)
    assert_close(out[:, :n], torch_linear(library, packed, x, bias), 1e-5, floor=k**0.5)
    assert (out[:, n:] == 0).all()


@FAST
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(2, 40),
    k=st.integers(1, 300),
    form=st.sampled_from(FORMATS),
)
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(library, seed, rows, k, form):
    rng = rng_of(seed)
    k = padded_columns(form, k)
    x = normal(rng, rows, k) * rng.uniform(0.01, 30, (rows, 1)).astype(np.float32)
    packed = Packed(library, normal(rng, 70, k), form)
    together = linear(library, packed, x, threads=2)
    for row in rng.choice(rows, 3):
        alone = linear(library, packed, x[row : row + 1].copy())
        assert torch.equal(alone[0], together[row])
    start = int(rng.integers(rows))
    assert torch.equal(linear(library, packed, x[start:].copy(), threads=3), together[start:])


def test_int8_is_exact_at_its_extremes(library):
    # All products have the maximum magnitude: the 16-bit sum of two must not saturate.
    k = 256
    for sign in (1, -1):
        x = np.full((3, k), 5.0, dtype=np.float32)
        weight = np.full((33, k), sign * 2.0, dtype=np.float32)
        out = linear(library, Packed(library, weight, "INT8"), x)
        assert torch.allclose(out[:, :33], torch.tensor(sign * 10.0 * k), rtol=1e-6)
    zeros = linear(library, Packed(library, np.zeros((5, k), np.float32), "INT8"), np.zeros((1, k), np.float32))
    assert (zeros == 0).all()


@pytest.mark.parametrize("form", BLOCK_FORMATS)
@pytest.mark.parametrize("sign", [1, -1])
def test_block_formats_are_exact_at_their_extremes(library, form, sign):
    """All weights have the greatest integer of the format, or all the least: no sum of products may overflow."""
    x = np.full((7, 512), sign * 3.0, dtype=np.float32)
    for byte in (0xFF, 0x00, 0x7F, 0x80):
        blocks = to_blocks(np.ones((33, 512), dtype=np.float32), form)
        width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]][1]
        cells = blocks.reshape(33, -1, width)
        scales = {"Q6_K": slice(208, 210), "Q4_0": slice(0, 2), "Q5_0": slice(0, 2), "Q8_0": slice(0, 2)}
        kept = cells[..., scales.get(form, slice(0, 4))].copy()
        cells[:] = byte
        cells[..., scales.get(form, slice(0, 4))] = kept
        packed = Packed(library, np.ones((33, 512), dtype=np.float32), "BF16")
        data = np.zeros(library.matrix_bytes(form, 33, 512), dtype=np.uint8)
        assert library.pack(form, blocks, 33, 512, data) == 0
        packed.struct = WeightsStruct(pointer(data), None, packed.n, packed.k, FORMATS.index(form))
        weight = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[form])).double()
        expected = F.linear(torch.from_numpy(x).double(), weight)
        assert_close(linear(library, packed, x)[:, :33], expected, 2e-6)


@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_rows_of_block_formats_have_the_bits_that_gguf_gives_them(library, form):
    packed = Packed(library, normal(rng_of(3), 70, 512), form)
    out = np.empty(512, dtype=np.float32)
    for row in range(70):
        native_ops(library.build).treadle_op_unpack_row(byref(packed.struct), row, pointer(out))
        assert np.array_equal(out.view(np.int32), packed.weight[row].view(np.int32))


@pytest.mark.parametrize("form", BLOCK_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_counted(library, form, bad):
    blocks = to_blocks(normal(rng_of(4), 40, 512), form)
    width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]][1]
    start = 208 if form == "Q6_K" else 0
    blocks.reshape(40, -1, width)[37, 1, start : start + 2] = np.array([bad], np.float16).view(np.uint8)
    data = np.zeros(library.matrix_bytes(form, 40, 512), dtype=np.uint8)
    assert library.pack(form, blocks, 40, 512, data) == (8 if form.endswith("_K") else 1)


@FAST
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 140),
    inter=st.integers(1, 100),
    k=st.integers(1, 90),
    forms=st.one_of(
        st.sampled_from(FORMATS).map(lambda form: (form, form)),
        st.tuples(st.sampled_from(BLOCK_FORMATS), st.sampled_from(BLOCK_FORMATS)),
    ),
)
def test_gate_and_up_equals_torch(library, seed, rows, inter, k, forms):
    rng = rng_of(seed)
    k = max(padded_columns(form, k) for form in forms)
    x = normal(rng, rows, k)
    gate, up = (Packed(library, normal(rng, inter, k), form) for form in forms)
    out = np.full((rows, gate.n), np.nan, dtype=np.float32)
    native_ops(library.build).treadle_op_linear_silu_mul(
        byref(gate.struct), byref(up.struct), pointer(x), rows, k, pointer(out), 2
    )
    out = torch.from_numpy(out)
    expected = F.silu(torch_linear(library, gate, x)) * torch_linear(library, up, x)
    assert_close(out[:, :inter], expected, 3e-5, floor=k**0.5)
    assert (out[:, inter:] == 0).all()


@FAST
@given(seed=st.integers(0, 1000), size=st.integers(1, 300), narrowing=st.sampled_from(NARROWINGS))
def test_rms_norm_equals_torch(library, seed, size, narrowing):
    rng = rng_of(seed)
    x, weight = normal(rng, size) * 7, normal(rng, size)
    out = np.empty(size, dtype=np.float32)
    native_ops(library.build).treadle_op_rms_norm(
        pointer(x), pointer(weight), size, 1e-5, NARROWINGS.index(narrowing), pointer(out)
    )
    expected = reference.rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-5)
    # Half a unit in the last place of the narrow type.
    step = 2**-7 if narrowing == "bfloat16" else 1 / 127
    assert_close(torch.from_numpy(out), expected, 0.501 * step + 1e-5)


@FAST
@given(seed=st.integers(0, 1000), heads=st.integers(1, 5), half=st.integers(1, 128), has_norm=st.booleans())
def test_rotary_embedding_equals_torch(library, seed, heads, half, has_norm):
    rng = rng_of(seed)
    x, weight, angles = normal(rng, heads, 2 * half), normal(rng, 2 * half), rng.uniform(0, 7, half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = np.empty_like(x)
    native_ops(library.build).treadle_op_rotary(
        pointer(x),
        heads,
        2 * half,
        pointer(weight if has_norm else None),
        1e-6,
        pointer(cos),
        pointer(sin),
        pointer(out),
    )
    expected = torch.from_numpy(x)
    if has_norm:
        expected = reference.rms_norm(expected, torch.from_numpy(weight), 1e-6)
    doubled = [torch.from_numpy(np.concatenate([t, t]))[None, None] for t in (cos, sin)]
    assert_close(torch.from_numpy(out), reference.rotary(expected[None], *doubled)[0], 1e-5)


class Cache:
    """A paged cache with shuffled blocks, full of NaN."""

    def __init__(self, library, rng, *, block_size, kv_heads, head_dim, tokens, int8):
        num_blocks = -(-tokens // block_size) + 2
        shape = {"num_layers": 1, "block_size": block_size, "num_kv_heads": kv_heads, "head_dim": head_dim}
        self.struct = kv_cache_struct(**shape, int8=int8)
        # A guard area behind it detects writes past the end.
        size = library.kv_block_bytes(self.struct) * num_blocks
        self.pool = np.full(size + 4096, 0xFF, dtype=np.uint8)
        self.pool[size:] = 7
        self.size = size
        self.struct.base = self.pool.ctypes.data
        self.table = rng.permutation(num_blocks).astype(np.int32)
        self.library = library

    def store(self, positions, keys, values):
        positions = np.asarray(positions, dtype=np.int32)
        keys, values = np.ascontiguousarray(keys[positions]), np.ascontiguousarray(values[positions])
        native_ops(self.library.build).treadle_op_store_kv(
            byref(self.struct), pointer(self.table), pointer(positions), len(positions), keys.shape[-1],
            pointer(keys), pointer(values),
        )  # fmt: skip
        assert (self.pool[self.size :] == 7).all()

    def attend(self, first, queries, per_item=16):
        out = np.full_like(queries, np.nan)
        native_ops(self.library.build).treadle_op_attention(
            byref(self.struct), pointer(self.table), first, len(queries), queries.shape[1],
            queries.shape[2], per_item, pointer(queries), pointer(out),
        )  # fmt: skip
        return torch.from_numpy(out)


def torch_attention(queries, keys, values, first, *, int8):
    """Compute attention in plain torch, with keys and values rounded as in the cache."""
    head_dim = queries.shape[-1]
    if int8:
        q, k, v = (reference.round_to_int8(torch.from_numpy(x), head_dim) for x in (queries, keys, values))
    else:
        q, k, v = torch.from_numpy(queries), bf16(keys), bf16(values)
    length = first + len(queries)
    mask = torch.zeros(len(queries), length)
    mask[torch.arange(length)[None, :] > first + torch.arange(len(queries))[:, None]] = -torch.inf
    return reference.prefill_attention(q, k.flatten(1), v.flatten(1), torch.arange(length), mask)


@examples(60)
@given(
    seed=st.integers(0, 1000),
    group=st.sampled_from([1, 3, 4, 8]),
    kv_heads=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([2, 16, 24, 64, 80, 128]),
    block_size=st.sampled_from([1, 4, 16, 24, 32]),
    first=st.integers(0, 150),
    count=st.integers(1, 40),
    int8=st.booleans(),
)
def test_attention_equals_torch(library, seed, group, kv_heads, head_dim, block_size, first, count, int8):
    rng = rng_of(seed)
    length = first + count
    keys, values = normal(rng, length, kv_heads, head_dim), normal(rng, length, kv_heads, head_dim)
    queries = normal(rng, count, kv_heads * group, head_dim) * 2
    shape = {"block_size": block_size, "kv_heads": kv_heads, "head_dim": head_dim, "tokens": length}
    cache = Cache(library, rng, **shape, int8=int8)
    cache.store(range(length), keys, values)
    out = cache.attend(first, queries)
    # Probabilities and, without int8, queries are rounded to bfloat16.
    assert_close(out, torch_attention(queries, keys, values, first, int8=int8), 1.5e-2)
    # The result for a single token is bit-identical, in a cache without any later token.
    fresh = Cache(library, rng, **shape, int8=int8)
    cut = int(rng.integers(count))
    fresh.store(range(first + cut + 1), keys, values)
    alone = fresh.attend(first + cut, queries[cut : cut + 1].copy())
    assert torch.equal(alone[0], out[cut])
    per_item = cache.attend(first, queries, per_item=int(rng.integers(1, 8)))
    assert torch.equal(per_item, out)


def test_attention_does_not_depend_on_the_block_size(library):
    rng = rng_of(1)
    keys, values = normal(rng, 100, 2, 64), normal(rng, 100, 2, 64)
    queries = normal(rng, 30, 6, 64)
    for int8 in (False, True):
        outs = []
        for block_size in (1, 3, 16, 48, 128):
            cache = Cache(library, rng, block_size=block_size, kv_heads=2, head_dim=64, tokens=100, int8=int8)
            cache.store(range(100), keys, values)
            outs.append(cache.attend(70, queries))
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_an_attention_sink_keeps_the_precision_of_other_values(library):
    """A token with nearly all of the probability and a value of zero must not hide the contribution of the others."""
    rng = rng_of(2)
    keys, values = normal(rng, 60, 1, 64) * 0.1, normal(rng, 60, 1, 64)
    queries = np.ones((1, 1, 64), dtype=np.float32)
    keys[0], values[0] = 0.9, 0.0
    for int8 in (False, True):
        cache = Cache(library, rng, block_size=16, kv_heads=1, head_dim=64, tokens=60, int8=int8)
        cache.store(range(60), keys, values)
        assert_close(cache.attend(59, queries), torch_attention(queries, keys, values, 59, int8=int8), 2e-2)


def test_cells_are_padded_to_the_vector_size(library):
    cache = Cache(library, rng_of(0), block_size=16, kv_heads=1, head_dim=24, tokens=16, int8=False)
    assert library.kv_block_bytes(cache.struct) == 2 * CELL * 32 * 2
