"""Several sequences, beams, orders and limits through the offline API."""

import json

import pytest

from treadle import LLM, BeamSearchParams, LoRARequest, SamplingParams
from treadle.core.errors import ConfigError, InvalidRequestError, Overloaded
from treadle.trace.recording import Recording

pytestmark = pytest.mark.slow


def test_sampled_sequences_differ_and_are_reproducible(llm):
    params = SamplingParams(n=4, seed=5, max_tokens=10, logprobs=1)
    first, second = (llm.generate("Once upon a time", params, use_tqdm=False)[0] for _ in range(2))
    texts = [output.text for output in first.outputs]
    assert len(set(texts)) == 4
    assert texts == [output.text for output in second.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert all(len(output.logprobs) == len(output.token_ids) for output in first.outputs)


def test_a_stop_string_ends_a_single_sequence(llm):
    params = SamplingParams(n=3, seed=2, max_tokens=40, ignore_eos=True)
    (free,) = llm.generate("Once upon a time", params, use_tqdm=False)
    word = free.outputs[1].text.split()[3]
    stopping = SamplingParams(n=3, seed=2, max_tokens=40, ignore_eos=True, stop=word)
    (output,) = llm.generate("Once upon a time", stopping, use_tqdm=False)
    for ours, whole in zip(output.outputs, free.outputs, strict=True):
        assert ours.text == whole.text.split(word)[0]
        assert ours.finish_reason == ("stop" if word in whole.text else "length")
    assert output.outputs[1].stop_reason == word


def test_streamed_pieces_of_each_sequence_join_to_its_text(llm):
    params = SamplingParams(n=3, seed=2, max_tokens=15, stop="the")
    (whole,) = llm.generate("Once upon a time", params, use_tqdm=False)
    texts, tokens, reasons = {}, {}, {}
    for output in llm.stream("Once upon a time", params):
        for new in output.outputs:
            assert new.index not in reasons
            texts[new.index] = texts.get(new.index, "") + new.text
            tokens.setdefault(new.index, []).extend(new.token_ids)
            if new.finish_reason:
                reasons[new.index] = new.finish_reason
    for output in whole.outputs:
        assert texts[output.index] == output.text
        assert tokens[output.index] == output.token_ids
        assert reasons[output.index] == output.finish_reason


def test_beam_search(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    (output,) = llm.beam_search("The capital of France is", params, use_tqdm=False)
    sums = [o.cumulative_logprob / len(o.token_ids) for o in output.outputs]
    assert sums == sorted(sums, reverse=True)
    assert output.outputs[0].text.startswith(" Paris")
    (greedy,) = llm.generate(
        "The capital of France is", SamplingParams(temperature=0.0, max_tokens=8, logprobs=0), use_tqdm=False
    )
    assert output.outputs[0].cumulative_logprob >= greedy.outputs[0].cumulative_logprob - 1e-3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n: must be at least 1"),
        ({"n": 2, "temperature": 0.0}, "n: must be 1 with greedy sampling"),
        ({"use_beam_search": True, "stop": "x"}, "stop: stop strings are not supported with beam search"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs: not supported with beam search"),
        ({"use_beam_search": True, "early_stopping": "maybe"}, "early_stopping: must be True, False or 'never'"),
    ],
)
def test_invalid_sampling_parameters_are_refused(params, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**params)


def test_unsupported_requests_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="use_beam_search: cannot be streamed"):
        llm.stream("x", SamplingParams(n=2, use_beam_search=True))
    adapter = LoRARequest("style", 1, "/nowhere")
    with pytest.raises(InvalidRequestError, match="adapter 'style': this runner cannot compute LoRA adapters yet"):
        llm.generate("x", use_tqdm=False, lora_request=adapter)
    with pytest.raises(InvalidRequestError, match=r"n: must be at most max_num_seqs \(32\), got 33"):
        llm.generate("x", SamplingParams(n=33), use_tqdm=False)
    with pytest.raises(TypeError, match="unexpected keyword 'prio'"):
        llm.generate("x", use_tqdm=False, prio=1)
    with pytest.raises(InvalidRequestError, match="priority: there are 1 of them for 2 prompts"):
        llm.generate(["x", "y"], use_tqdm=False, priority=[1])
    with pytest.raises(InvalidRequestError, match="priority: must be an integer"):
        llm.generate("x", use_tqdm=False, priority="high")
    assert not llm.engine.has_unfinished_requests


def test_orders_overload_and_recording(tmp_path):
    path = tmp_path / "run.jsonl"
    llm = LLM(
        dtype="float32", max_model_len=256, num_kv_blocks=40, max_num_seqs=1, order="priority", record=str(path),
        max_num_queued_requests=3, swap_space=0.1,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=3)
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False, priority=[2, 0, 1])
    starts = [output.metrics.first_scheduled_time for output in outputs]
    assert sorted(range(3), key=starts.__getitem__) == [1, 2, 0]
    with pytest.raises(Overloaded, match="3 requests are waiting and the limit is 3"):
        llm.generate(["a"] * 4, params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests
    (output,) = llm.generate("after", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    recording = Recording(path)
    assert len(recording.records) == llm.engine.num_steps
    assert json.dumps(recording.chrome_trace())
    assert "prefill" in recording.table()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "best"}, "order: unknown order 'best'"),
        ({"preemption_mode": "drop"}, "preemption_mode: must be one of auto, recompute, swap; got 'drop'"),
        ({"swap_space": -1}, "swap_space: must be a number of GiB, at least 0"),
        ({"scheduler": "three-phase", "max_model_len": 600, "max_num_batched_tokens": 300}, "computes prompts whole"),
        ({"age_limit_s": 0}, "age_limit_s: must be greater than 0 or None"),
        ({"record": "/no/such/folder/run.jsonl"}, "record: .* cannot be written"),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**options)
