"""Inconsistent model files: the error gives the file, the key, its value and the expected value."""

import math
import struct

import numpy as np
import pytest
import safetensors.numpy
import torch

from support.model_files import (
    ARRAY,
    BOOL,
    F32,
    FLOAT32,
    STRING,
    TOKENS,
    UINT32,
    VOCAB,
    gguf_bytes,
    gguf_fields,
    gguf_tensors,
    huggingface_files,
    weights,
    write_folder,
)
from support.native import RUNNABLE, native_library
from support.tiny import CASES, make_model
from treadle.backends.cpu.model import NativeModel, why_not_native
from treadle.backends.torch.model import TorchModel
from treadle.core.errors import InvalidRequestError, ModelLoadError
from treadle.models.registry import load_path
from treadle.models.spec import weight_shapes

TYPES = (ARRAY, UINT32)


def load_gguf(path, fields=None, tensors=None):
    path.write_bytes(gguf_bytes(fields or gguf_fields(), gguf_tensors() if tensors is None else tensors))
    return load_path(path)


@pytest.mark.parametrize(
    ("key", "field", "message"),
    [
        ("llama.embedding_length", (STRING, "8"), "must be an integer from 1 to 2147483647, got '8'"),
        ("llama.attention.head_count", (UINT32, 0), "must be an integer from 1 to 2147483647, got 0"),
        ("llama.attention.head_count", (TYPES, [2, 2]), r"must be an integer .*, got \[2, 2\]"),
        ("llama.attention.head_count_kv", (UINT32, 0), "must be an integer from 1"),
        ("llama.block_count", (UINT32, 2**31), "must be an integer from 1 to 4096, got 2147483648"),
        ("llama.context_length", (UINT32, 2**30), "max_position_embeddings must be at most 16777216"),
        ("llama.context_length", (BOOL, True), "must be an integer from 1 to 2147483647, got True"),
        ("llama.attention.layer_norm_rms_epsilon", (FLOAT32, math.nan), "must be a finite number .*, got nan"),
        ("llama.attention.layer_norm_rms_epsilon", (FLOAT32, -1.0), "greater than 0, got -1.0"),
        ("llama.rope.freq_base", (FLOAT32, 0.0), "rope_theta must be a finite number of at least 1, got 0.0"),
        ("llama.rope.freq_base", (FLOAT32, math.nan), "must be a finite number, got nan"),
        ("llama.rope.scaling.factor", (FLOAT32, math.inf), "must be a finite number, got inf"),
        ("llama.rope.scaling.type", (UINT32, 1), "must be text, got 1"),
        ("llama.vocab_size", (UINT32, 2**31 - 1), r"token_embd.weight has shape \(16, 8\), the config needs \(2147"),
        ("general.alignment", (STRING, "32"), "must be an integer from 1 to 2147483647, got '32'"),
        ("general.alignment", (UINT32, 0), "must be an integer from 1 to 2147483647, got 0"),
        ("general.architecture", (UINT32, 5), "must be text, got 5"),
        ("general.architecture", (STRING, "mamba"), "GGUF architecture 'mamba' is not supported; supported are llama"),
        ("tokenizer.ggml.model", (STRING, "bert"), "tokenizer.ggml.model 'bert' is not supported; supported are 'gpt2'"),
        ("tokenizer.ggml.pre", (STRING, "x"), "tokenizer.ggml.pre 'x' is not supported; supported are default, gpt-2"),
        ("general.sampling.temp", (STRING, "hot"), "general.sampling.temp must be a finite number, got 'hot'"),
        ("general.sampling.top_p", (FLOAT32, 3.0), r"general.sampling.top_p must be in \(0, 1\], got 3"),
        ("tokenizer.ggml.tokens", (UINT32, 3), "must be a list of texts, got 3"),
        ("tokenizer.ggml.tokens", (TYPES, [1, 2]), r"tokenizer.ggml.tokens\[0\] must be one of a list of texts, got 1"),
        ("tokenizer.ggml.tokens", ((ARRAY, STRING), ["a"] * VOCAB), "tokens contains 'a' twice"),
        ("tokenizer.ggml.tokens", ((ARRAY, STRING), []), "must be a positive integer, got 0"),
        ("tokenizer.ggml.token_type", (TYPES, [1, 1]), "token_type must have 16 entries, got 2"),
        ("tokenizer.ggml.merges", ((ARRAY, STRING), ["a z"]), "merges must be pairs of tokens .*`z` out of voc"),
        ("tokenizer.ggml.merges", ((ARRAY, STRING), ["ab"]), "merges must be pairs of tokens"),
        ("tokenizer.ggml.bos_token_id", (UINT32, VOCAB), "must be an integer from 0 to 15, got 16"),
        ("tokenizer.ggml.eos_token_id", (UINT32, VOCAB), "must be an integer from 0 to 15, got 16"),
        ("tokenizer.ggml.eos_token_id", (STRING, "2"), "must be an integer from 0 to 15, got '2'"),
        ("tokenizer.ggml.eot_token_id", (UINT32, 2**32 - 1), "must be an integer from 0 to 15, got 4294967295"),
        ("tokenizer.ggml.add_bos_token", (UINT32, 1), "must be true or false, got 1"),
        ("tokenizer.chat_template", (UINT32, 7), "must be text, got 7"),
        ("tokenizer.chat_template", (STRING, "{% if %}"), "chat template is not valid"),
        ("tokenizer.chat_template", (STRING, "{{" + "(" * 5000), "chat template is not valid"),
    ],
)  # fmt: skip
def test_invalid_gguf_metadata_is_refused(key, field, message, tmp_path):
    with pytest.raises(ModelLoadError, match=rf"model\.gguf: .*{message}"):
        load_gguf(tmp_path / "model.gguf", gguf_fields() | {key: field})


@pytest.mark.parametrize("key", ["general.architecture", "llama.block_count", "llama.embedding_length"])
def test_missing_gguf_metadata_is_named(key, tmp_path):
    fields = gguf_fields()
    del fields[key]
    with pytest.raises(ModelLoadError, match=rf"model\.gguf lacks '{key}'"):
        load_gguf(tmp_path / "model.gguf", fields)


def test_a_gguf_array_of_arrays_is_refused(tmp_path):
    nested = struct.pack("<IQ", ARRAY, 1) * 5000 + struct.pack("<IQ", UINT32, 0)
    with pytest.raises(ModelLoadError, match=r"model\.gguf: extra is an array of arrays"):
        load_gguf(tmp_path / "model.gguf", gguf_fields() | {"extra": ((ARRAY, ARRAY), [nested])})


def test_a_duplicate_gguf_key_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(gguf_fields() | {"llama.block_counT": (UINT32, 2)}, gguf_tensors()))
    path.write_bytes(path.read_bytes().replace(b"block_counT", b"block_count"))
    with pytest.raises(ModelLoadError, match=r"model\.gguf: the key 'llama.block_count' occurs twice"):
        load_path(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "blk.0.attn_k.weight"}, "'blk.0.attn_k.weight' occurs twice"),
        ({"shape": ()}, "must have 1 to 4 dimensions, got 0"),
        ({"shape": (2,) * 5}, "must have 1 to 4 dimensions, got 5"),
        ({"shape": (8, 0)}, r"must have dimensions from 1 to 2147483647, got \(8, 0\)"),
        ({"shape": (8, 2**63)}, r"must have dimensions from 1 to 2147483647, got \(8, 9223"),
        ({"shape": (4, 8)}, r"attn_q.weight has shape \(4, 8\), the config needs \(8, 8\)"),
        ({"kind": 2}, r"must have a multiple of 32 as its last dimension, got \(8, 8\)"),
        ({"kind": 99}, "is quantized as type 99; supported are F32"),
        ({"offset": 2**40}, "cut off; blk.0.attn_q.weight needs bytes 1099"),
        ({"offset": 2**64 - 32}, "cut off; blk.0.attn_q.weight needs bytes 1844"),
        ({"offset": 0}, "the tensors .* and .* overlap"),
        ({"offset": 1}, "the offset of blk.0.attn_q.weight must be a multiple of 32, got 1"),
    ],
)
def test_invalid_gguf_tensors_are_refused(changes, message, tmp_path):
    tensors = gguf_tensors()
    i = next(i for i, tensor in enumerate(tensors) if tensor[0] == "blk.0.attn_q.weight")
    described = dict(zip(("name", "shape", "kind", "offset", "raw"), tensors[i], strict=True)) | changes
    tensors[i] = tuple(described.values())
    with pytest.raises(ModelLoadError, match=rf"model\.gguf: .*({message})"):
        load_gguf(tmp_path / "model.gguf", tensors=tensors)


def test_rope_divisors_of_the_wrong_size_are_refused(tmp_path):
    raw = np.ones(3, dtype=np.float32).tobytes()
    _, _, _, offset, last = gguf_tensors()[-1]
    extra = ("rope_freqs.weight", (3,), F32, offset + len(last), raw)
    with pytest.raises(ModelLoadError, match=r"model\.gguf: rope_freqs.weight must have 2 numbers.*got 3"):
        load_gguf(tmp_path / "model.gguf", tensors=[*gguf_tensors(), extra])


def test_a_sentencepiece_token_of_a_megabyte_is_refused(tmp_path):
    """All its splits together would have half a trillion characters."""
    tokens = [*TOKENS[:-1], "a" * 2**20]
    fields = gguf_fields() | {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": ((ARRAY, STRING), tokens),
        "tokenizer.ggml.scores": ((ARRAY, FLOAT32), [0.0] * VOCAB),
    }
    assert load_gguf(tmp_path / "model.gguf", fields).tokenizer.vocab_size == VOCAB


def test_a_vocabulary_with_too_few_scores_is_refused(tmp_path):
    fields = gguf_fields() | {"tokenizer.ggml.model": (STRING, "llama")}
    with pytest.raises(ModelLoadError, match="no token scores"):
        load_gguf(tmp_path / "model.gguf", fields)
    fields["tokenizer.ggml.scores"] = ((ARRAY, FLOAT32), [0.0])
    with pytest.raises(ModelLoadError, match="scores must have 16 entries, got 1"):
        load_gguf(tmp_path / "model.gguf", fields)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config", {"architectures": "LlamaForCausalLM"}, "architectures must be a list of texts, got 'Llama"),
        ("config", {"architectures": ["Mamba"]}, "config.json: architecture Mamba is not supported; supported are Llam"),
        ("config", {"architectures": [None]}, r"architectures\[0\] must be one of a list of texts, got None"),
        ("config", {"hidden_size": "8"}, "hidden_size must be an integer from 1 to 2147483647, got '8'"),
        ("config", {"hidden_size": [8]}, r"hidden_size must be an integer from 1 to 2147483647, got \[8\]"),
        ("config", {"num_attention_heads": 0}, "num_attention_heads must be an integer from 1 .*, got 0"),
        ("config", {"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 4096, got 1000000000"),
        ("config", {"vocab_size": 2**31 - 1}, r"embed_tokens.weight has shape \(16, 8\), the config needs \(2147483647"),
        ("config", {"vocab_size": 10**400}, "vocab_size must be an integer from 1 to 2147483647, got 1"),
        ("config", {"max_position_embeddings": 10**9}, "max_position_embeddings must be at most 16777216"),
        ("config", {"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number greater than 0, got nan"),
        ("config", {"rms_norm_eps": -1e-5}, "rms_norm_eps must be a finite number greater than 0, got -1e-05"),
        ("config", {"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number greater than 0, got 1"),
        ("config", {"rope_theta": 0}, "rope_theta must be a finite number of at least 1, got 0"),
        ("config", {"rope_theta": math.inf}, "rope_theta must be a finite number, got inf"),
        ("config", {"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ("config", {"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope factor must be a .* at least 1, got 0"),
        ("config", {"rope_scaling": {"type": ["linear"]}}, r"rope_scaling: type must be text, got \['linear'\]"),
        (
            "config",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            r"high_freq_factor \(4.0\) must be greater than low_freq_factor \(4.0\)",
        ),
        ("config", {"hidden_act": 5}, "hidden_act must be text, got 5"),
        ("config", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ("config", {"eos_token_id": VOCAB}, "eos_token_id must be a token id from 0 to 15, got 16"),
        ("config", {"quantization_config": "gptq"}, "quantization_config must be an object, got 'gptq'"),
        ("generation_config", {"eos_token_id": "2"}, "eos_token_id must be a token id from 0 to 15, got '2'"),
        ("generation_config", {"eos_token_id": [2, -1]}, "eos_token_id must be a token id from 0 to 15, got -1"),
        ("generation_config", {"eos_token_id": [[2]]}, r"eos_token_id must be a token id from 0 to 15, got \[2\]"),
        ("generation_config", {"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
        ("generation_config", {"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ("generation_config", {"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
        ("tokenizer_config", {"bos_token": 3}, "bos_token must be text, got 3"),
        ("tokenizer_config", {"eos_token": {"content": 3}}, "eos_token: content must be text, got 3"),
        ("tokenizer_config", {"eos_token": "\ud800"}, "eos_token must be text"),
        ("tokenizer_config", {"chat_template": 7}, "chat_template must be text, got 7"),
        ("tokenizer_config", {"chat_template": ["x"]}, r"chat_template\[0\] must be an object, got 'x'"),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}, r"chat_template\[0\] lacks 'template'"),
    ],
)  # fmt: skip
def test_invalid_huggingface_configs_are_refused(file, changes, message, tmp_path):
    files = huggingface_files()
    files[f"{file}.json"] |= changes
    if file == "config":
        files["generation_config.json"] = {}
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_path(write_folder(tmp_path / "model", files))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "[" * 100_000, r"config.json: cannot be read"),
        ("config.json", '"text"', r"config.json: is not a JSON object"),
        ("generation_config.json", b"\xff\xfe", r"generation_config.json: cannot be read"),
        ("tokenizer.json", "{}", r"tokenizer.json: cannot be read as a tokenizer"),
        ("chat_template.jinja", b"\xff", r"chat_template.jinja: cannot be read"),
        ("model.safetensors", b"\xff" * 100, r"model.safetensors: cannot be read as safetensors"),
        ("model.safetensors.index.json", {}, r"index.json lacks 'weight_map'"),
        ("model.safetensors.index.json", {"weight_map": [1]}, r"weight_map must be an object, got \[1\]"),
        ("model.safetensors.index.json", {"weight_map": {"a": 1}}, r"weight_map: a must be text, got 1"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../model.safetensors"}}, "files of the folder, got '../"),
        ("model.safetensors.index.json", {"weight_map": {"a": "b.safetensors"}}, "b.safetensors: cannot be read"),
    ],
)  # fmt: skip
def test_invalid_huggingface_files_are_refused(file, content, message, tmp_path):
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_path(write_folder(tmp_path / "model", huggingface_files() | {file: content}))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unk_token": "nowhere"}, "Unk token `nowhere` not found in the vocabulary"),
        ({"unk_token": "<unk>", "type": "WordLevel", "vocab": {"a": 0}}, "WordLevel error: Missing \\[UNK\\] token"),
    ],
)
def test_tokenizers_that_cannot_encode(changes, message, tmp_path):
    files = huggingface_files()
    files["tokenizer.json"]["model"] |= changes
    loaded = load_path(write_folder(tmp_path / "model", files))
    with pytest.raises(InvalidRequestError, match=f"prompt: the model's tokenizer cannot encode it .*{message}"):
        loaded.tokenizer.encode("xyz")


def test_panics_of_the_tokenizer(tmp_path):
    files = huggingface_files()
    files["tokenizer.json"]["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }
    loaded = load_path(write_folder(tmp_path / "model", files))
    with pytest.raises(InvalidRequestError, match="cannot encode it .the tokenizers library failed: index out of"):
        loaded.tokenizer.encode("abc")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    files = huggingface_files()
    files["second.safetensors"] = files["model.safetensors"]
    with pytest.raises(ModelLoadError, match=r"second\.safetensors: another file of the folder also contains"):
        load_path(write_folder(tmp_path / "model", files))


def test_integer_weights_are_refused(tmp_path):
    files = huggingface_files()
    values = {name: value.astype(np.int32) for name, value in weights().values()}
    files["model.safetensors"] = safetensors.numpy.save(values)
    with pytest.raises(ModelLoadError, match=r"embed_tokens.weight has dtype I32; supported are F64, F32"):
        load_path(write_folder(tmp_path / "model", files))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_down.weight", "output_norm.weight"])
def test_non_finite_weights_are_refused(name, value, tmp_path):
    tensors = gguf_tensors()
    for i, (other, shape, kind, offset, raw) in enumerate(tensors):
        if other == name:
            values = np.frombuffer(raw, dtype=np.float32).copy()
            values[[1, 5]] = value
            tensors[i] = (other, shape, kind, offset, values.tobytes())
    loaded = load_gguf(tmp_path / "model.gguf", tensors=tensors)
    with pytest.raises(
        ModelLoadError, match=rf"model\.gguf: {name} has 2 values that are NaN or infinite in float32"
    ):
        torch_model(loaded)


def torch_model(loaded, weights=None):
    return TorchModel(
        loaded.config, weights or loaded.weights, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
    )


class RecordingWeights:
    """Weights that record the names and shapes requested from them."""

    def __init__(self, weights):
        self.weights = weights
        self.asked = {}

    def get(self, name, shape, dtype):
        self.asked[name] = shape
        return self.weights.get(name, shape, dtype)


@pytest.mark.parametrize("name", CASES)
def test_the_checked_weights_are_those_that_backends_load(name, tmp_path):
    make_model(name, tmp_path)
    loaded = load_path(tmp_path)
    noted = RecordingWeights(loaded.weights)
    torch_model(loaded, noted)
    assert noted.asked == dict(weight_shapes(loaded.config))
    if RUNNABLE and why_not_native(loaded.config) is None:
        noted = RecordingWeights(loaded.weights)
        NativeModel(loaded.config, noted, library=native_library(), weight_format="bfloat16", max_model_len=64)
        assert noted.asked == dict(weight_shapes(loaded.config))


def test_a_null_value_counts_as_absent(tmp_path):
    files = huggingface_files()
    files["config.json"] |= {"rope_theta": None, "head_dim": None, "hidden_act": None}
    files["tokenizer_config.json"] |= {"bos_token": None, "chat_template": None}
    loaded = load_path(write_folder(tmp_path / "model", files))
    assert loaded.chat_template is None
    assert loaded.config.layers[0].attention.rope.theta == 10000.0
