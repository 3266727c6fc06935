"""bench/make_models.py on small shapes: other readers and Treadle agree on what the files contain."""

import importlib.util
import math
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from support.oracles import reference_logits
from treadle import LLM, SamplingParams
from treadle.models.loaders.gguf_file import GGUFFile
from treadle.models.registry import load_model

SCRIPT = Path(__file__).parents[2] / "bench" / "make_models.py"
SIZES = {
    "hidden_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "vocab_size": 49152 + 40, "context_length": 128, "rope_theta": 500000.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def make_models():
    spec = importlib.util.spec_from_file_location("make_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def shape_of(make_models, architecture):
    changes = {"head_dim": 128, "qk_norm": True} if architecture == "qwen3" else {}
    return make_models.Shape(architecture=architecture, **{**SIZES, **changes})


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_random_blocks_have_the_wanted_deviation_and_no_mean(make_models, kind):
    kind = gguf.GGMLQuantizationType[kind]
    blocks = make_models.random_blocks(np.random.default_rng(1), (512, 2048), kind, 0.02)
    values = gguf.quants.dequantize(blocks, kind)
    assert values.shape == (512, 2048)
    assert values.std() == pytest.approx(0.02, rel=0.02)
    assert abs(values.mean()) < 1e-4
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "form"), [("llama", "q4_0"), ("qwen3", "q4_k"), ("llama", "q8_0")])
def test_a_file_is_read_alike_by_transformers_and_generates(make_models, architecture, form, tmp_path):
    path = tmp_path / "small.gguf"
    shape = shape_of(make_models, architecture)
    make_models.write_model(path, shape, make_models.FORMATS[form])
    assert [file.name for file in tmp_path.iterdir()] == ["small.gguf"]
    assert 0 <= path.stat().st_size - make_models.num_bytes(shape, make_models.FORMATS[form]) < 4e6  # the tokenizer

    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    llm = LLM(str(path), num_kv_blocks=32, max_num_seqs=4, swap_space=0, log_stats_interval_s=0)
    prompt = list(llm.get_tokenizer().encode("The sky is blue because of"))
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)

    logits = reference_logits(oracle.eval(), prompt)
    assert logits.std() == pytest.approx(make_models.LOGIT_DEVIATION, rel=0.3)
    theirs = torch.log_softmax(logits, dim=-1)[torch.arange(len(prompt) - 1), prompt[1:]].numpy()
    ours = np.array([row[token].logprob for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)])
    assert np.abs(ours - theirs).mean() < 0.05 * theirs.std()

    tokens = output.outputs[0]
    assert len(set(tokens.token_ids)) > 2
    assert all(
        math.isfinite(row[token].logprob) for token, row in zip(tokens.token_ids, tokens.logprobs, strict=True)
    )


def test_tokenizer_and_chat_template_are_the_embedded_models(make_models, embedded_path, tmp_path):
    path = tmp_path / "small.gguf"
    make_models.write_model(path, shape_of(make_models, "llama"), make_models.FORMATS["q4_0"])
    ours, theirs = GGUFFile(path).metadata, GGUFFile(embedded_path).metadata
    for key in (key for key in theirs if key.startswith("tokenizer.")):
        assert (ours[key][:49152] if isinstance(ours[key], list) else ours[key]) == theirs[key], key
    assert ours["tokenizer.ggml.token_type"][49152:] == [int(gguf.TokenType.UNUSED)] * 40
    assert load_model(str(path)).config.vocab_size == 49152 + 40


def test_the_command_writes_the_named_files(make_models, tmp_path, monkeypatch, capsys):
    small = (shape_of(make_models, "llama"), make_models.FORMATS["q4_0"])
    monkeypatch.setitem(make_models.MODELS, "small-q4_0", small)
    monkeypatch.setattr(sys, "argv", ["make_models.py", "--out", str(tmp_path / "new"), "small-q4_0"])
    make_models.main()
    assert "small-q4_0.gguf: 0.0" in capsys.readouterr().out
    with monkeypatch.context() as context:
        context.setattr(make_models.shutil, "disk_usage", lambda _: make_models.shutil._ntuple_diskusage(1, 1, 0))
        with pytest.raises(SystemExit, match=r"small-q4_0 needs 0.01 GB, .*new has 0.00 GB left"):
            make_models.main()


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-1b-q4_0", 1.24e9), ("llama-3b-q4_k", 3.21e9), ("qwen3-0.6b-q8_0", 0.596e9)]
)
def test_the_shapes_have_the_models_numbers_of_parameters(make_models, name, parameters):
    shape, form = make_models.MODELS[name]
    total = sum(math.prod(size) for _, size, _, _ in make_models._tensors(shape, form))
    assert total == pytest.approx(parameters, rel=0.005)
