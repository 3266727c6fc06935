"""A stream belongs to a request, not to its id: clients choose the ids and may reuse them."""

import asyncio

import pytest

from support.tiny import make_model
from treadle import SamplingParams
from treadle.assembly.build import build_engine
from treadle.assembly.engine_config import EngineConfig
from treadle.core.errors import EngineError, InvalidRequestError
from treadle.engine.async_engine import AsyncEngine
from treadle.scheduler import Scheduler
from treadle.text.input_processor import RequestOptions

PATIENCE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_model("tiny", folder)
    return str(folder)


@pytest.fixture
def run(model):
    """Run `script(engine, add)` on an event loop; `add(*names, max_tokens=)` returns a stream for each name."""
    built = build_engine(EngineConfig(model=model, num_kv_blocks=60, block_size=8, check_invariants=True))

    def run(script, all_free=True):
        async def body():
            engine = AsyncEngine(built.engine)
            engine.start()

            async def add(*names, max_tokens=8):
                count = len(names)
                requests = built.input_processor.make_requests(
                    list(names),
                    [{"prompt_token_ids": [5, 6, 7]}] * count,
                    [SamplingParams(max_tokens=max_tokens, ignore_eos=True)] * count,
                    [RequestOptions()] * count,
                    arrival_time=0.0,
                )
                return await engine.add(requests, stream=True)

            try:
                await asyncio.wait_for(script(engine, add), PATIENCE_S)
            finally:
                await engine.shut_down()

        asyncio.run(body())
        if all_free:
            assert built.engine.scheduler.kv.num_available_blocks == 60

    return run


async def tokens(stream):
    return [token for output in [o async for o in stream] for part in output.outputs for token in part.token_ids]


def test_aborting_a_finished_stream_does_not_affect_a_new_request_with_its_id(run):
    async def script(engine, add):
        (first,) = await add("a", max_tokens=3)
        assert len(await tokens(first)) == 3
        (second,) = await add("a", max_tokens=12)
        engine.abort(first)  # its caller disconnects only now
        assert len(await tokens(second)) == 12

    run(script)


def test_refusing_a_duplicate_id_does_not_affect_the_request_that_has_it(run):
    async def script(engine, add):
        (first,) = await add("a", max_tokens=12)
        for _ in range(3):
            with pytest.raises(InvalidRequestError, match="already in use"):
                await add("a")
            refused = asyncio.ensure_future(add("a"))
            await asyncio.sleep(0)
            refused.cancel()
            with pytest.raises((asyncio.CancelledError, InvalidRequestError)):
                await refused
        assert len(await tokens(first)) == 12

    run(script)


def test_a_request_id_stays_in_use_until_the_last_output_is_delivered(run):
    async def script(engine, add):
        for _ in range(3):
            (first,) = await add("a", max_tokens=500)
            engine.abort(first)
            while True:
                try:
                    (second,) = await add("a", max_tokens=5)
                    break
                except InvalidRequestError:
                    await asyncio.sleep(0)
            assert len(await tokens(second)) == 5

    run(script)


def test_a_fault_of_the_scheduler_ends_every_stream(run, monkeypatch):
    async def script(engine, add):
        streams = await add("a", "b", max_tokens=300)
        others = [asyncio.ensure_future(tokens(stream)) for stream in streams]
        await engine.call(lambda: monkeypatch.setattr(Scheduler, "schedule", fail))
        for other in others:
            with pytest.raises(EngineError, match="the engine has failed in step .* broken"):
                await other
        with pytest.raises(EngineError, match="the engine has failed"):
            await add("c")
        await engine.shut_down()
        monkeypatch.undo()

    def fail(self):
        raise ValueError("it is broken")

    run(script, all_free=False)


def test_the_outputs_of_a_stream_share_the_prompts_list(run):
    async def script(engine, add):
        (stream,) = await add("a")
        outputs = [output async for output in stream]
        assert len(outputs) > 1
        assert outputs[0].prompt_token_ids == [5, 6, 7]
        assert all(output.prompt_token_ids is outputs[0].prompt_token_ids for output in outputs)

    run(script)
