"""The GGUF reader, compared with the reader of the gguf package, and on broken files."""

import gguf
import numpy as np
import pytest
import torch

from support.engines import logits_of
from support.gguf_files import write_llama_gguf
from support.oracles import reference_logits
from treadle.backends.torch.model import TorchModel
from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.models.architectures import find_gguf, gguf_names
from treadle.models.loaders.gguf import SUPPORTED_TYPES
from treadle.models.loaders.gguf_file import GGUFFile
from treadle.models.registry import load_model


def load_weights(path):
    loaded = load_model(str(path))
    model = TorchModel(
        loaded.config, loaded.weights, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
    )
    return loaded, model


@pytest.fixture
def written_path(tmp_path):
    path = tmp_path / "model.gguf"
    write_llama_gguf(path, gguf.GGMLQuantizationType.Q8_0)
    return path


@pytest.mark.parametrize("file", ["written_path", pytest.param("embedded_path", marks=pytest.mark.slow)])
def test_metadata_and_tensors_equal_the_gguf_package(file, request):
    path = request.getfixturevalue(file)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors[:: max(1, len(theirs.tensors) // 14)]:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(map(int, tensor.shape))[::-1]
        assert np.array_equal(ours.raw(info).reshape(-1), tensor.data.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_every_gguf_type_equals_transformers_on_the_same_values(kind, tmp_path):
    path = tmp_path / "model.gguf"
    oracle = write_llama_gguf(path, gguf.GGMLQuantizationType[kind])
    loaded, model = load_weights(path)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    ours, theirs = logits_of(loaded, model, prompt), reference_logits(oracle, prompt)
    assert (ours - theirs).abs().max() < 1e-3 * max(1.0, float(theirs.abs().max()))


def test_rope_divisors_equal_llama3_scaling(tmp_path):
    path = tmp_path / "model.gguf"
    oracle = write_llama_gguf(path, gguf.GGMLQuantizationType.F32, llama3_rope=True)
    loaded, model = load_weights(path)
    prompt = [i % 32 for i in range(60)]
    assert (logits_of(loaded, model, prompt) - reference_logits(oracle, prompt)).abs().max() < 1e-3


@pytest.mark.parametrize("name", gguf_names())
def test_weight_names_equal_those_of_the_gguf_package(name):
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    theirs = gguf.get_tensor_name_map(arch, 12)
    weights = find_gguf(name, "file").weights
    for pattern in weights.names:
        weight = pattern.format(11)
        if not pattern.endswith("_norm") or name == "qwen3":  # only Qwen3 normalizes queries and keys
            assert weights.name_of(f"{weight}.weight") == f"{theirs.get_name(weight)}.weight"


def test_the_error_for_an_unsupported_type_names_it(tmp_path):
    path = tmp_path / "model.gguf"
    write_llama_gguf(path, gguf.GGMLQuantizationType.IQ4_NL)
    with pytest.raises(UnsupportedModelError, match="quantized as IQ4_NL; supported are F32"):
        load_model(str(path))


def test_the_error_for_an_unsupported_architecture_names_it(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported are llama, qwen2, qwen3"):
        load_model(str(path))


@pytest.mark.parametrize("length", [0, 3, 10, 100, 5_000, 1_000_000])
def test_truncated_files_are_refused(length, embedded_path, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(embedded_path.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        load_model(str(path))


def test_a_file_truncated_in_its_tensors_is_refused(embedded_path, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(embedded_path.read_bytes()[:-5000])
    with pytest.raises(ModelLoadError, match="cut off; .* needs bytes"):
        load_weights(path)


@pytest.mark.parametrize("seed", range(20))
def test_random_changes_to_a_header_cause_errors_not_crashes(seed, embedded_path, tmp_path):
    data = bytearray(embedded_path.read_bytes()[:3_000_000])
    rng = np.random.default_rng(seed)
    for position in rng.integers(4, 2_000, size=30):
        data[position] = rng.integers(256)
    path = tmp_path / "scrambled.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError):
        load_weights(path)


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        load_model(str(path))
