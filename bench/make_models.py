"""Write GGUF files with the shapes of well-known models and random weights, to measure speed without a download.

    python bench/make_models.py --out /tmp/models llama-1b-q4_0 qwen3-0.6b-q8_0
    python bench/compare.py --model /tmp/models/llama-1b-q4_0.gguf

A name is a shape and a format; the file is NAME.gguf. Speed depends on both, not on the values of the weights: use
these files for figures of speed and memory, never of accuracy. The text that they generate has no meaning.

shapes    llama-1b    Llama-3.2-1B: hidden 2048, 16 layers, 32/8 heads of 64, MLP 8192, vocabulary 128256
          llama-3b    Llama-3.2-3B: hidden 3072, 28 layers, 24/8 heads of 128, MLP 8192, vocabulary 128256
          qwen3-0.6b  Qwen3-0.6B: hidden 1024, 28 layers, 16/8 heads of 128, MLP 3072, vocabulary 151936
formats   q4_0, q4_k  with the embedding, which is also the output projection, in Q6_K, as llama.cpp stores it
          q8_0        all matrices

Tokenizer and chat template are those of the embedded model; unused tokens fill the vocabulary up to the shape's size.
Weights are valid blocks of random quants, written directly and not quantized from floats. Their scales give them a
standard deviation of 1/sqrt(columns), so that activations keep their size from layer to layer, and logits one of 2.5;
greedy outputs are diverse at first and end in repetition.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from treadle.core.config import DEFAULT_MODEL
from treadle.models.registry import find_model

LOGIT_DEVIATION = 2.5
EMBEDDING_NORM = 0.5
"""Length of an embedding. A layer's output is longer, so that a token does not predict itself, although the output
projection has the same weights; the last norm makes up for the factor."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model, with GGUF's name of its architecture; embeddings are tied."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    eps: float = 1e-5
    qk_norm: bool = False


@dataclass(frozen=True)
class Format:
    """The types of the matrices, and GGUF's name for their mixture."""

    matrices: Kind
    embedding: Kind
    file_type: gguf.LlamaFileType


SHAPES = {
    "llama-1b": Shape(
        architecture="llama", hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128256, context_length=131072, rope_theta=500000.0,
    ),
    "llama-3b": Shape(
        architecture="llama", hidden_size=3072, num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128,
        intermediate_size=8192, vocab_size=128256, context_length=131072, rope_theta=500000.0,
    ),
    "qwen3-0.6b": Shape(
        architecture="qwen3", hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151936, context_length=40960, rope_theta=1000000.0, eps=1e-6, qk_norm=True,
    ),
}  # fmt: skip
FORMATS = {
    "q4_0": Format(Kind.Q4_0, Kind.Q6_K, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_k": Format(Kind.Q4_K, Kind.Q6_K, gguf.LlamaFileType.MOSTLY_Q4_K_S),
    "q8_0": Format(Kind.Q8_0, Kind.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
MODELS = {f"{shape}-{form}": (SHAPES[shape], FORMATS[form]) for shape in SHAPES for form in FORMATS}


def write_model(path: Path, shape: Shape, form: Format, seed: int = 0) -> None:
    """Write a GGUF file, one tensor after the other; `path` appears when it is complete."""
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, shape.architecture)
    try:
        _add_metadata(writer, path.stem, shape, form)
        tensors = list(_tensors(shape, form))
        for name, size, kind, _ in tensors:
            stored = gguf.quant_shape_to_byte_shape(size, kind) if kind is not Kind.F32 else size
            dtype = np.dtype(np.float32 if kind is Kind.F32 else np.uint8)
            writer.add_tensor_info(name, stored, dtype, int(np.prod(stored)) * dtype.itemsize, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.Generator(np.random.SFC64(seed))
        for _, size, kind, value in tensors:
            is_norm = kind is Kind.F32
            writer.write_tensor_data(
                np.full(size, value, np.float32) if is_norm else random_blocks(rng, size, kind, value)
            )
        writer.close()
        os.replace(partial, path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def num_bytes(shape: Shape, form: Format) -> int:
    """Bytes of all tensors of a file."""
    total = 0
    for _, size, kind, _ in _tensors(shape, form):
        block, stored = gguf.GGML_QUANT_SIZES[kind]
        total += int(np.prod(size)) // block * stored
    return total


def random_blocks(rng: np.random.Generator, size: tuple[int, int], kind: Kind, deviation: float) -> np.ndarray:
    """The blocks of a random matrix with a mean of 0 and the given standard deviation: uint8 [rows, row bytes].

    Quants are uniform. Their mean is made up for by the signs of the scales, which are random, and in Q4_K, whose
    scales have no sign, by the minimum.
    """
    block, stored = gguf.GGML_QUANT_SIZES[kind]
    count = size[0] * size[1] // block
    blocks = rng.integers(0, 256, (count, stored), dtype=np.uint8)
    if kind in (Kind.Q4_0, Kind.Q8_0):
        levels = np.arange(-8, 8) if kind is Kind.Q4_0 else np.arange(-128, 128)
        signs = 1.0 - 2.0 * rng.integers(0, 2, (count, 1), dtype=np.uint8)
        blocks[:, :2] = _half(signs * deviation / _rms(levels))
    elif kind is Kind.Q4_K:
        scales = np.arange(32, 64)
        own = rng.integers(32, 64, (count, 8), dtype=np.uint8)
        d = deviation / (_rms(scales) * np.std(np.arange(16)))
        blocks[:, 0:2], blocks[:, 2:4] = _half(d), _half(d * np.mean(np.arange(16)))
        # A scale and a minimum of 6 bits for each of 8 groups, here the same number twice.
        blocks[:, 4:8] = blocks[:, 8:12] = own[:, :4] | own[:, 4:] >> 4 << 6
        blocks[:, 12:16] = (own[:, 4:] & 15) * 17
    elif kind is Kind.Q6_K:
        scales = np.arange(64, 128)
        signs = 1 - 2 * rng.integers(0, 2, (count, 16), dtype=np.int8)
        blocks[:, -18:-2] = (rng.integers(64, 128, (count, 16), dtype=np.int8) * signs).view(np.uint8)
        blocks[:, -2:] = _half(deviation / (_rms(scales) * _rms(np.arange(-32, 32))))
    else:
        raise ValueError(f"no random blocks of type {kind.name}")
    return blocks.reshape(size[0], -1)


def _add_metadata(writer: gguf.GGUFWriter, name: str, shape: Shape, form: Format) -> None:
    writer.add_name(f"{name}, random weights")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(form.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, field in _tokenizer_fields().items():
        value = field.contents()
        if key == gguf.Keys.Tokenizer.LIST:
            value += [f"<|unused_{i}|>" for i in range(len(value), shape.vocab_size)]
        elif key == gguf.Keys.Tokenizer.TOKEN_TYPE:
            value += [int(gguf.TokenType.UNUSED)] * (shape.vocab_size - len(value))
        writer.add_key_value(key, value, field.types[0], field.types[1] if len(field.types) > 1 else None)


@cache
def _tokenizer_fields() -> dict[str, gguf.ReaderField]:
    fields = gguf.GGUFReader(find_model(DEFAULT_MODEL)).fields
    return {key: field for key, field in fields.items() if key.startswith("tokenizer.")}


def _tensors(shape: Shape, form: Format) -> Iterator[tuple[str, tuple[int, ...], Kind, float]]:
    """Name, shape, type, and value of each norm [size] or standard deviation of each matrix [outputs, inputs]."""
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocab_size, hidden), form.embedding, EMBEDDING_NORM / hidden**0.5
    for layer in range(shape.num_layers):
        norms = {"attn_norm": hidden, "ffn_norm": hidden}
        if shape.qk_norm:
            norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
        for name, length in norms.items():
            yield f"blk.{layer}.{name}.weight", (length,), Kind.F32, 1.0
        matrices = {
            "attn_q": (q_size, hidden),
            "attn_k": (kv_size, hidden),
            "attn_v": (kv_size, hidden),
            "attn_output": (hidden, q_size),
            "ffn_gate": (intermediate, hidden),
            "ffn_up": (intermediate, hidden),
            "ffn_down": (hidden, intermediate),
        }
        for name, size in matrices.items():
            yield f"blk.{layer}.{name}.weight", size, form.matrices, size[1] ** -0.5
    yield "output_norm.weight", (hidden,), Kind.F32, LOGIT_DEVIATION / EMBEDDING_NORM


def _rms(levels: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(levels, dtype=np.float64))))


def _half(values: np.ndarray | float) -> np.ndarray:
    """The bytes of float16 numbers [.., 1]: uint8 [.., 2]."""
    return np.atleast_1d(np.asarray(values, np.float16)).view(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", choices=MODELS, help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, required=True, help="folder for the files; created if it does not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    options = parser.parse_args()
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: must be at least 0")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        shape, form = MODELS[name]
        needed, free = num_bytes(shape, form), shutil.disk_usage(options.out).free
        if needed > free:
            sys.exit(f"{name} needs {needed / 1e9:.2f} GB, {options.out} has {free / 1e9:.2f} GB left")
        path, start = options.out / f"{name}.gguf", time.monotonic()
        write_model(path, shape, form, options.seed)
        print(f"{path}: {path.stat().st_size / 1e9:.2f} GB in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
