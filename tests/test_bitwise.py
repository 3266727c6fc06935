"""On the native kernels outputs are bit-identical under every schedule: tokens and log-probabilities.

Each of 24 requests runs first alone, with its prompt in one step, and then under every kind of schedule. The tiny model
runs on every build that this machine supports, the embedded model on the best build.
"""

import struct
from dataclasses import dataclass
from typing import Any

import pytest

from support.child_runner import Child
from support.engines import TestEngine
from support.native import RUNNABLE, native_library
from support.real_prompts import CODE, STORY
from support.tiny import make_prompts
from treadle import SamplingParams
from treadle.backends.cpu.model import NativeModel

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="this processor has no native kernels")

LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 47, 48, 63, 64, 65, 90, 100, 127, 128, 129, 200, 260, 400, 1988]
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"temperature": 0.9, "n": 3},
    {"temperature": 0.0, "presence_penalty": 0.3, "logit_bias": {200: 2.0}},
]
# Only the embedded model's vocabulary can spell the texts of a grammar.
WITH_GRAMMARS = [*KINDS, {"temperature": 0.8, "structured_outputs": {"regex": "[a-z ,.]*"}}]


def make_requests(prompts, kinds):
    """Return greedy and seeded requests with filters, penalties and several sequences."""
    requests = []
    for i, prompt in enumerate(prompts):
        kind = kinds[i % len(kinds)]
        common = {"max_tokens": 10 + i % 3, "seed": i, "logprobs": 3, "ignore_eos": "structured_outputs" not in kind}
        requests.append((prompt, SamplingParams(**common, **kind)))
    return requests


def real_prompts(tokenizer):
    words = tokenizer.encode((STORY + CODE) * 2)
    return [words[0 if i % 3 == 0 else 7 * i :][:length] for i, length in enumerate(LENGTHS[:-1])]


def bits(output):
    """Return the whole output, with log-probabilities as bits."""
    assert output.error is None
    return [
        (
            completion.token_ids,
            completion.finish_reason,
            [
                [(token_id, struct.pack("<d", entry.logprob), entry.rank) for token_id, entry in position.items()]
                for position in completion.logprobs
            ],
        )
        for completion in output.outputs
    ]


@dataclass(frozen=True)
class Numbers:
    """A model, a build of the kernels, a number format, and whether a child process runs the steps."""

    model: str
    build: str
    weights: str
    in_child: bool = False

    def __str__(self):
        where = "-child" if self.in_child else ""
        return f"{self.model}-{self.build}-{self.weights}{where}"


class Path:
    """A model on one build in one number format, and the output of each request when it runs alone."""

    def __init__(self, loaded: Any, prompts: list[list[int]], kinds: list[dict[str, Any]], numbers: Numbers):
        self.loaded = loaded
        self.child = None
        self.int8 = numbers.weights == "int8"
        self.model = NativeModel(
            loaded.config, loaded.weights, library=native_library(numbers.build),
            weight_format=numbers.weights, max_model_len=2048,
        )  # fmt: skip
        self.requests = make_requests(prompts, kinds)
        self.alone = []
        for request in self.requests:
            self.alone += self.run([request], enable_prefix_caching=False, max_num_batched_tokens=2048)

    def run(self, requests, on_step=None, min_preemptions=0, **options):
        engine = TestEngine(self.loaded, self.model, int8_kv=self.int8, child=self.child, **options)
        for i, (prompt, params) in enumerate(requests):
            engine.add(str(i), prompt, params)
        results = engine.run(*([] if on_step is None else [lambda step: on_step(engine, step)]))
        assert len(engine.preemptions) >= min_preemptions
        return [bits(results[str(i)]) for i in range(len(requests))]

    def check(self, **options):
        assert self.run(self.requests, **options) == self.alone

    def check_in_a_small_pool(self, **options):
        """Run all requests but the longest in a pool that holds little more than one of them."""
        got = self.run(
            self.requests[:23],
            max_num_batched_tokens=96,
            num_blocks=30,
            admission_headroom=0,
            min_preemptions=3,
            **options,
        )
        assert got == self.alone[:23]


def numbers(model, builds, formats, *marks):
    return [pytest.param(Numbers(model, build, weights), marks=marks) for build in builds for weights in formats]


MADE = ("int8", "bfloat16", "int4")
TINY = [*numbers("tiny", RUNNABLE[:1], MADE), *numbers("tiny", RUNNABLE[1:], MADE, pytest.mark.slow)]
# A runner in another process, which gets only pickled plans, computes the same bits.
CHILD = [
    pytest.param(Numbers("tiny", build, weights, in_child=True), marks=pytest.mark.slow)
    for build in RUNNABLE[:1]
    for weights in MADE
]
REAL = numbers("real", RUNNABLE[:1], ("int8", "bfloat16", "stored"), pytest.mark.slow)
CHILD += [
    pytest.param(Numbers("real", build, "stored", in_child=True), marks=pytest.mark.slow) for build in RUNNABLE[:1]
]


@pytest.fixture(scope="module")
def path(request, tiny):
    """The path under test. It is built once, because pytest groups the tests of a module by this parameter."""
    wanted = request.param
    if wanted.model == "tiny":
        path, source = Path(tiny.loaded, make_prompts(LENGTHS), KINDS, wanted), tiny.folder
    else:
        loaded = request.getfixturevalue("embedded_model")
        path = Path(loaded, real_prompts(loaded.tokenizer), WITH_GRAMMARS, wanted)
        source = request.getfixturevalue("embedded_path")
    if wanted.in_child:
        path.child = Child(source, wanted.build, wanted.weights)
    yield path
    if path.child is not None:
        path.child.close()


@pytest.mark.parametrize("path", TINY + CHILD + REAL, indirect=True, scope="module", ids=str)
class TestEveryPath:
    def test_together(self, path):
        path.check(max_num_batched_tokens=512)

    def test_in_a_pool_that_forces_recompute(self, path):
        path.check_in_a_small_pool(preemption_mode="recompute")


@pytest.mark.parametrize("path", TINY, indirect=True, scope="module", ids=str)
class TestTinyPaths:
    @pytest.mark.parametrize("chunk", [7, 16, 64, 128, 2048])
    def test_chunks(self, path, chunk):
        path.check(max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16), enable_prefix_caching=False)

    @pytest.mark.parametrize("longest", [400, pytest.param(1988, marks=pytest.mark.slow)])
    def test_chunks_of_one(self, path, longest):
        # Requests with three sequences would need steps of three tokens.
        requests = enumerate(path.requests)
        single = [i for i, (prompt, params) in requests if params.n == 1 and len(prompt) <= longest]
        got = path.run([path.requests[i] for i in single], max_num_batched_tokens=1, max_num_seqs=1)
        assert got == [path.alone[i] for i in single]

    def test_one_thread(self, path):
        path.check(max_num_batched_tokens=200, threads=1)

    def test_three_threads(self, path):
        path.check(max_num_batched_tokens=200, threads=3)

    @pytest.mark.parametrize("policy", ["phased", "prefill-first", "three-phase"])
    def test_policies(self, path, policy):
        path.check(max_num_batched_tokens=2048, scheduler=policy)

    def test_a_warm_prefix_cache(self, path):
        twice = path.run(path.requests + path.requests, max_num_batched_tokens=300)
        assert twice == path.alone + path.alone

    def test_in_a_pool_that_forces_swaps(self, path):
        path.check_in_a_small_pool(preemption_mode="swap", num_host_blocks=200)

    def test_a_block_size_that_is_not_a_multiple_of_the_cells(self, path):
        path.check(max_num_batched_tokens=256, block_size=12, num_blocks=600)

    def test_neighbours_are_aborted(self, path):
        neighbours = [([5 + i, 6, 7] * 9, SamplingParams(temperature=0.0, max_tokens=60)) for i in range(8)]

        def on_step(engine, step):
            if step == 1:
                for i, (prompt, params) in enumerate(neighbours):
                    engine.add(f"neighbour {i}", prompt, params)
            if step % 3 == 0 and step // 3 <= len(neighbours):
                engine.engine.abort_request(f"neighbour {step // 3 - 1}")

        path.check(max_num_batched_tokens=64, on_step=on_step)
