"""On the native kernels no schedule changes a bit of an answer: tokens and log-probabilities are identical.

One set of 24 requests, each first run alone and whole, then under every kind of schedule.
"""

import struct

import pytest

from engines import TestEngine
from native import RUNNABLE, native_library
from real_prompts import CODE, STORY
from treadle import SamplingParams
from treadle.models.native import NativeModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RUNNABLE, reason="this processor has no native kernels"),
]

NUM_REQUESTS = 24
LONGEST = 2000


def make_requests(tokenizer):
    """Greedy and seeded, with filters, penalties and several sequences; a few share beginnings."""
    words = tokenizer.encode((STORY + CODE) * 5)
    lengths = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 47, 48, 63, 64, 65, 90, 100, 127, 128, 129, 200, 260, 400]
    found = []
    for i, length in enumerate([*lengths, LONGEST - 12]):
        start = 0 if i % 3 == 0 else 7 * i
        if i == NUM_REQUESTS - 1:
            start = 0
        options = {"max_tokens": 10 + i % 3, "ignore_eos": True, "logprobs": 3}
        kinds = [
            {"temperature": 0.0},
            {"temperature": 0.8, "seed": i},
            {"temperature": 1.0, "seed": i, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
            {"temperature": 0.7, "seed": i, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
            {"temperature": 0.9, "seed": i, "n": 3},
            {"temperature": 0.0, "presence_penalty": 0.3, "logit_bias": {200: 2.0}},
        ]
        found.append((words[start : start + length], SamplingParams(**options, **kinds[i % len(kinds)])))
    assert len(found) == NUM_REQUESTS
    return found


def bits(output):
    """Everything that an answer says, with log-probabilities as their bits."""
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


class Path:
    """The embedded model on one build, with one kind of numbers."""

    def __init__(self, loaded, build, int8):
        self.loaded = loaded
        self.int8 = int8
        self.model = NativeModel(
            loaded.config, loaded.weights, library=native_library(build), int8=int8, max_model_len=2048
        )
        self.requests = make_requests(loaded.tokenizer)
        if build != RUNNABLE[0]:
            del self.requests[-1]  # the longest takes as long as all others together
        self.alone = []
        for request in self.requests:
            self.alone += self.run([request], enable_prefix_caching=False, max_num_batched_tokens=2048)

    def run(self, requests, on_step=None, min_preemptions=0, **options):
        engine = TestEngine(self.loaded, self.model, int8_kv=self.int8, **options)
        num_preemptions = 0

        class Count:
            def on_schedule(self, plan):
                nonlocal num_preemptions
                num_preemptions += len(plan.preempted)

            def on_update(self, plan, finished):
                pass

        engine.engine.add_observer(Count())
        for i, (prompt, params) in enumerate(requests):
            engine.add(str(i), prompt, params)
        results = engine.run(*([] if on_step is None else [lambda step: on_step(engine, step)]))
        assert num_preemptions >= min_preemptions
        return [bits(results[str(i)]) for i in range(len(requests))]

    def check(self, **options):
        assert self.run(self.requests, **options) == self.alone

    def check_in_a_small_pool(self, **options):
        """All but the longest, in a pool that holds little more than one of them."""
        got = self.run(
            self.requests[:23],
            max_num_batched_tokens=96,
            num_blocks=30,
            admission_headroom=0,
            min_preemptions=3,
            **options,
        )
        assert got == self.alone[:23]


PATHS = [(build, int8) for build in RUNNABLE for int8 in (True, False)]
FULL = [pytest.param(path, id=f"{path[0]}-{'int8' if path[1] else 'bf16'}") for path in PATHS[:2]]
EVERY = [pytest.param(path, id=f"{path[0]}-{'int8' if path[1] else 'bf16'}") for path in PATHS]


@pytest.fixture(scope="module")
def path(request, embedded_model):
    """Made once per path: pytest orders the tests of a module by such a fixture's parameter."""
    return Path(embedded_model, *request.param)


@pytest.mark.parametrize("path", EVERY, indirect=True, scope="module")
class TestEveryPath:
    def test_together(self, path):
        path.check(max_num_batched_tokens=512)

    def test_in_a_pool_that_forces_recompute(self, path):
        path.check_in_a_small_pool(preemption_mode="recompute")


@pytest.mark.parametrize("path", FULL, indirect=True, scope="module")
class TestBestPaths:
    @pytest.mark.parametrize("chunk", [7, 16, 64, 128, 2048])
    def test_chunks(self, path, chunk):
        path.check(max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16), enable_prefix_caching=False)

    def test_chunks_of_one(self, path):
        # A step for every token, so the longest context is left out; three sequences need steps of three.
        single = [i for i, (_, params) in enumerate(path.requests[:-1]) if params.n == 1]
        got = path.run([path.requests[i] for i in single], max_num_batched_tokens=1, max_num_seqs=1)
        assert got == [path.alone[i] for i in single]

    def test_one_thread(self, path):
        path.check(max_num_batched_tokens=200, threads=1)

    def test_three_threads(self, path):
        path.check(max_num_batched_tokens=200, threads=3)

    @pytest.mark.parametrize("policy", ["phased", "prefill-first", "three-phase"])
    def test_policies(self, path, policy):
        path.check(max_num_batched_tokens=2048, policy=policy)

    def test_a_warm_prefix_cache(self, path):
        twice = path.run(path.requests + path.requests, max_num_batched_tokens=300)
        assert twice == path.alone + path.alone

    def test_in_a_pool_that_forces_swaps(self, path):
        path.check_in_a_small_pool(preemption_mode="swap", num_host_blocks=200)

    def test_a_block_size_that_cells_do_not_fit(self, path):
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
