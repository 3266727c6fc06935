"""Every supported architecture, as a tiny model with random weights, compared with transformers."""

import json

import pytest
import torch

from support.engines import TestEngine, logits_of
from support.oracles import assert_greedy, reference_logits
from support.tiny import CASES, VOCAB, make_model
from treadle import SamplingParams
from treadle.backends.torch.model import TorchModel
from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.models.registry import load_model


def load(folder, dtype=torch.float32):
    loaded = load_model(str(folder))
    model = TorchModel(loaded.config, loaded.weights, dtype=dtype, device=torch.device("cpu"), max_model_len=512)
    return loaded, model


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path):
    oracle = make_model(name, tmp_path)
    loaded, model = load(tmp_path)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (1, 5, 33, 64, 150)]
    for prompt in prompts:
        assert (logits_of(loaded, model, prompt) - reference_logits(oracle, prompt)).abs().max() < 1e-3
    engine = TestEngine(loaded, model, max_model_len=400, max_num_batched_tokens=40)
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(oracle, prompt, output, eos_ids={2}, max_tokens=20)


def test_sharded_checkpoints_are_loaded(tmp_path):
    oracle = make_model("llama3", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, model = load(tmp_path)
    prompt = [5, 6, 7]
    assert (logits_of(loaded, model, prompt) - reference_logits(oracle, prompt)).abs().max() < 1e-3


def test_bfloat16_is_close(tmp_path):
    oracle = make_model("qwen3", tmp_path)
    loaded, model = load(tmp_path, torch.bfloat16)
    prompt = list(range(3, 60))
    ours, theirs = logits_of(loaded, model, prompt), reference_logits(oracle, prompt)
    assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()


def test_eos_list_and_sampling_defaults(tmp_path):
    make_model("llama2", tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9, "do_sample": True})
    )
    loaded, _ = load(tmp_path)
    assert loaded.eos_token_ids == {2, 7}
    assert loaded.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            del config[name]
        else:
            config[name] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM is not supported; supported are LlamaFor",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn'.*default, linear, llama3",
        ),
        ({"hidden_act": "gelu"}, "mlp.activation 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' are not supported"),
    ],
)
def test_errors_name_unsupported_properties(changes, message, tmp_path):
    make_model("llama2", tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


def test_missing_and_misshapen_weights_are_named(tmp_path):
    make_model("llama2", tmp_path)
    edit_config(tmp_path, intermediate_size=96)
    with pytest.raises(ModelLoadError, match=r"gate_proj.weight has shape \(80, 48\), the config needs \(96, 48\)"):
        load(tmp_path)
    edit_config(tmp_path, intermediate_size=80, num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"lack model.layers.3\."):
        load(tmp_path)


def test_errors_name_the_broken_file(tmp_path):
    with pytest.raises(ModelLoadError, match="no config.json"):
        load_model(str(tmp_path))
    make_model("llama2", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="cannot be read as safetensors"):
        load_model(str(tmp_path))
    weights.unlink()
    with pytest.raises(ModelLoadError, match="no .safetensors files"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="config.json: cannot be read"):
        load_model(str(tmp_path))


def test_a_missing_config_field_is_named(tmp_path):
    make_model("llama2", tmp_path)
    edit_config(tmp_path, hidden_size=None)
    with pytest.raises(ModelLoadError, match=r"config.json lacks 'hidden_size'"):
        load_model(str(tmp_path))


def test_sliding_window_shorter_than_the_length(tmp_path):
    from treadle import LLM
    from treadle.core.errors import ConfigError

    make_model("mistral", tmp_path)
    edit_config(tmp_path, sliding_window=128)
    with pytest.raises(ConfigError, match="set max_model_len to at most 128"):
        LLM(str(tmp_path), dtype="float32")
    LLM(str(tmp_path), dtype="float32", max_model_len=128, num_kv_blocks=20)
