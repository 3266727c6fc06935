"""The native forward pass, compared with plain torch, for every supported architecture and for odd sizes."""

import numpy as np
import pytest
import torch

from support.engines import TestEngine, make_backend
from support.native import RUNNABLE, native_library
from support.tiny import CASES, VOCAB, make_model
from treadle import SamplingParams
from treadle.backends.cpu.model import NativeModel
from treadle.backends.torch.model import TorchModel
from treadle.models.registry import load_model
from treadle.scheduler import BlockMoves

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="this processor has no native kernels")

PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 33, 64, 150)]


def torch_model_of(loaded, *, int8):
    return TorchModel(
        loaded.config, loaded.weights, dtype=torch.float32, device=torch.device("cpu"), max_model_len=512, int8=int8
    )


def native_of(loaded, *, int8, build=None):
    weight_format = "int8" if int8 else "bfloat16"
    library = native_library(build)
    return NativeModel(loaded.config, loaded.weights, library=library, weight_format=weight_format, max_model_len=512)


def prompt_logprobs(loaded, model, **options):
    """Return the log-probabilities of prompt tokens and of the most likely first output, with two prompts per step."""
    engine = TestEngine(loaded, model, max_model_len=400, max_num_batched_tokens=40, **options)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, params)
    results = engine.run()
    found = []
    for i, prompt in enumerate(PROMPTS):
        rows = zip(prompt[1:], results[str(i)].prompt_logprobs[1:], strict=True)
        found += [entries[token].logprob for token, entries in rows]
        found += [entry.logprob for entry in results[str(i)].outputs[0].logprobs[0].values()]
    return np.array(found)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("int8", [False, True])
def test_the_native_forward_pass_equals_torch(name, int8, tmp_path):
    make_model(name, tmp_path, scale=0.12)
    loaded = load_model(str(tmp_path))
    expected = prompt_logprobs(loaded, torch_model_of(loaded, int8=int8), int8_kv=int8)
    ours = prompt_logprobs(loaded, native_of(loaded, int8=int8), int8_kv=int8)
    # Both round. A difference of one unit in the last place of the narrow type grows from layer to layer.
    assert np.abs(ours - expected).mean() < 0.04 * np.abs(expected).std()


@pytest.mark.parametrize("build", RUNNABLE)
@pytest.mark.parametrize(("int8", "int8_kv"), [(False, True), (True, False)])
def test_weights_and_kv_can_have_different_number_formats(build, int8, int8_kv, tmp_path):
    make_model("llama3", tmp_path, scale=0.12)
    loaded = load_model(str(tmp_path))
    expected = prompt_logprobs(loaded, torch_model_of(loaded, int8=int8), int8_kv=int8_kv)
    ours = prompt_logprobs(loaded, native_of(loaded, int8=int8, build=build), int8_kv=int8_kv)
    assert np.abs(ours - expected).mean() < 0.04 * np.abs(expected).std()


@pytest.mark.parametrize("int8", [False, True])
def test_several_tokens_of_a_row_equal_one_at_a_time(int8, tmp_path):
    """Logits of several tokens at the end of a sequence, next to a plain decode, equal those of single steps."""
    make_model("qwen3", tmp_path)
    loaded = load_model(str(tmp_path))
    model = native_of(loaded, int8=int8)
    rng = np.random.default_rng(4)
    tokens = rng.integers(3, VOCAB, (2, 90)).astype(np.int32)
    tables = rng.permutation(12).astype(np.int32).reshape(2, 6)

    def fresh():
        return make_backend(model, 12, 0, 16, int8, 2)

    def forward(backend, runs):
        """Return logits for `runs`, a list of (row, first position, count)."""
        positions = np.concatenate([np.arange(p, p + n) for _, p, n in runs]).astype(np.int32)
        rows = np.repeat([r for r, _, _ in runs], [n for _, _, n in runs]).astype(np.int32)
        counts = np.array([n for _, _, n in runs], dtype=np.int32)
        starts = (np.cumsum(counts) - counts).astype(np.int32)
        engine = backend._engine  # the backend keeps its memory
        engine.forward(tokens[rows, positions], positions, rows, tables, starts, counts, 2)
        out = np.empty((len(rows), VOCAB), dtype=np.float32)
        every = np.arange(len(rows), dtype=np.int32)
        best = engine.logits(every, every, out, 2)
        assert (best == out.argmax(axis=1)).all()
        return out

    one_by_one = fresh()
    forward(one_by_one, [(0, 0, 70), (1, 0, 33)])
    expected = [forward(one_by_one, [(0, p, 1)]) for p in range(70, 76)]
    neighbour = forward(one_by_one, [(1, 33, 1)])
    together = fresh()
    forward(together, [(1, 0, 33)])
    forward(together, [(0, 0, 70)])
    got = forward(together, [(0, 70, 6), (1, 33, 1)])
    assert np.array_equal(got, np.concatenate([*expected, neighbour]))


def test_swaps_and_copies_move_whole_blocks(tmp_path):
    make_model("llama2", tmp_path)
    loaded = load_model(str(tmp_path))
    backend = make_backend(native_of(loaded, int8=True), 4, 3, 16, True, 1)
    pool = backend.pool
    for block in range(4):
        pool[block] = block + 1

    backend.move_blocks(BlockMoves(swap_out=((0, 2), (1, 0)), swap_in=((2, 3),), copy=((3, 1),)))
    assert [int(pool[block, 0]) for block in range(4)] == [1, 1, 3, 1]
    assert (pool == pool[:, :1]).all()
