"""Expensive fixtures shared by many tests."""

import gc
import os
from typing import Any, NamedTuple

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


@pytest.fixture(scope="session")
def embedded_path():
    from treadle.core.config import DEFAULT_MODEL
    from treadle.models.registry import find_model

    return find_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def embedded_model(embedded_path):
    """The opened files of the embedded model; no weights are loaded."""
    from treadle.models.registry import load_path

    return load_path(embedded_path)


@pytest.fixture(scope="session")
def embedded_weights(embedded_model):
    """The embedded model in float32, shared by all engines that use it."""
    import torch

    from treadle.backends.torch.model import TorchModel

    return TorchModel(
        embedded_model.config,
        embedded_model.weights,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=2048,
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model of three layers with random weights: its files, its weights in float32, and transformers' model of it."""
    import torch

    from support.tiny import make_model
    from treadle.backends.torch.model import TorchModel
    from treadle.models.registry import load_path

    folder = tmp_path_factory.mktemp("tiny")
    oracle = make_model("tiny", folder)
    loaded = load_path(folder)
    weights = TorchModel(
        loaded.config, loaded.weights, dtype=torch.float32, device=torch.device("cpu"), max_model_len=4096
    )
    return Tiny(loaded, weights, oracle, folder)


class Tiny(NamedTuple):
    loaded: Any
    weights: Any
    oracle: Any
    folder: Any


@pytest.fixture(scope="session")
def llm():
    """The offline API on the embedded model, with invariant checks in every step."""
    from treadle import LLM

    return LLM(max_model_len=2048, num_kv_blocks=600, max_num_seqs=32, check_invariants=True)


@pytest.fixture(scope="session")
def oracle(embedded_path):
    """transformers' model of the embedded file, in float32."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        embedded_path.parent, gguf_file=embedded_path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def oracle_tokenizer(embedded_path):
    """transformers' tokenizer of the embedded file."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoTokenizer.from_pretrained(embedded_path.parent, gguf_file=embedded_path.name)


@pytest.fixture(autouse=True)
def _collect():
    """Collect garbage after each test, so that unclosed resources are reported in the test that leaves them."""
    yield
    gc.collect(0)
