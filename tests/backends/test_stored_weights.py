"""Models computed from the weights that a GGUF file stores, compared with transformers on the same values."""

import gguf
import numpy as np
import pytest
import torch

from support.engines import TestEngine
from support.gguf_files import write_llama_gguf
from support.native import RUNNABLE, native_library
from support.oracles import reference_logits
from treadle import SamplingParams
from treadle.backends.cpu.library import BLOCK_FORMATS
from treadle.backends.cpu.model import NativeModel
from treadle.core.errors import ModelLoadError
from treadle.models.loaders.gguf import BLOCK_TYPES
from treadle.models.registry import load_model

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="this processor has no native kernels")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
# As the files that are called Q4_K_M: different types side by side, and matrices of one product that differ.
MIXED = {
    "token_embd": "Q6_K", "output": "Q6_K", "blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q5_K", "blk.0.attn_k": "Q5_0",
    "blk.0.ffn_up": "Q8_0", "blk.0.attn_output": "F16",
}  # fmt: skip


def type_of(name):
    return gguf.GGMLQuantizationType[name]


def mixed(path):
    """Write a file with several types; return transformers' model of it."""
    return write_llama_gguf(path, type_of("Q4_K"), kinds={name: type_of(kind) for name, kind in MIXED.items()})


def native_of(loaded, build=None, weight_format="stored"):
    library = native_library(build)
    return NativeModel(loaded.config, loaded.weights, library=library, weight_format=weight_format, max_model_len=64)


def logprobs_of(loaded, model, **options):
    """Log-probabilities of the prompt's tokens from the second on, given those before them."""
    engine = TestEngine(loaded, model, max_model_len=64, **options)
    engine.add("0", PROMPT, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    rows = engine.run()["0"].prompt_logprobs[1:]
    return np.array([row[token].logprob for token, row in zip(PROMPT[1:], rows, strict=True)])


def oracle_logprobs(oracle):
    logprobs = torch.log_softmax(reference_logits(oracle, PROMPT)[:-1].double(), dim=-1)
    return logprobs[torch.arange(len(PROMPT) - 1), PROMPT[1:]].numpy()


def test_the_kernels_have_a_format_for_every_type_that_the_reader_calls_a_block_type():
    assert set(BLOCK_FORMATS) == set(BLOCK_TYPES)


@pytest.mark.parametrize("build", RUNNABLE)
@pytest.mark.parametrize("kind", [*BLOCK_FORMATS, "mixed"])
def test_every_type_is_close_to_transformers_on_the_stored_values(kind, build, tmp_path):
    path = tmp_path / "model.gguf"
    oracle = mixed(path) if kind == "mixed" else write_llama_gguf(path, type_of(kind))
    loaded = load_model(str(path))
    theirs = oracle_logprobs(oracle)
    # Only activations, keys and values are rounded, to 8 bits and more.
    assert np.abs(logprobs_of(loaded, native_of(loaded, build)) - theirs).mean() < 0.03 * theirs.std()


@pytest.mark.parametrize("build", RUNNABLE)
def test_a_file_of_several_types_gives_the_same_bits_in_chunks(build, tmp_path):
    mixed(tmp_path / "model.gguf")
    loaded = load_model(str(tmp_path / "model.gguf"))
    model = native_of(loaded, build)
    whole = logprobs_of(loaded, model)
    for chunk, threads in ((1, 1), (3, 2), (7, 3)):
        assert (
            logprobs_of(loaded, model, max_num_batched_tokens=chunk, max_num_seqs=1, threads=threads) == whole
        ).all()


def test_the_formats_are_those_of_the_file(tmp_path):
    mixed(tmp_path / "model.gguf")
    model = native_of(load_model(str(tmp_path / "model.gguf")))
    # What the file stores as floats is rounded to 8 bits.
    assert sorted(model.formats) == ["Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0"]
    assert "Q4_K" in model.describe_weights()


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bits_take_at_most_five(form):
    library = native_library()
    assert library.matrix_bytes(form, 512, 1024) <= 512 * 1024 * 5 / 8


def test_int4_rounds_weights_to_four_bits_with_a_minimum(tmp_path):
    oracle = write_llama_gguf(tmp_path / "model.gguf", type_of("F32"))
    loaded = load_model(str(tmp_path / "model.gguf"))
    model = native_of(loaded, weight_format="int4")
    assert model.formats == ["Q4_1", "Q8_0"]
    theirs = oracle_logprobs(oracle)
    assert np.abs(logprobs_of(loaded, model) - theirs).mean() < 0.25 * theirs.std()


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_scale_that_is_not_finite_is_refused_with_the_tensors_name(kind, bad, tmp_path):
    path = tmp_path / "model.gguf"
    write_llama_gguf(path, type_of(kind))
    (tensor,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + (208 if kind == "Q6_K" else 0))
        file.write(np.array([bad], dtype=np.float16).tobytes())
    message = r"model.gguf: blk.0.ffn_up.weight has \d+ groups of weights whose scale is NaN or infinite"
    with pytest.raises(ModelLoadError, match=message):
        native_of(load_model(str(path)))
