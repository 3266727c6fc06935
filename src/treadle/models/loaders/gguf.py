"""Reads a GGUF file: its metadata as spec and tokenizer, its tensors decoded to floats."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.models.architectures import find_gguf
from treadle.models.gguf_metadata import GGUFMetadata
from treadle.models.loaders.base import CheckpointWeights, LoadedModel, read_spec
from treadle.models.loaders.gguf_file import GGUFFile
from treadle.text import ChatTemplate
from treadle.text.gguf_tokenizer import eos_token_ids_from_gguf, tokenizer_from_gguf

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

# general.sampling.* → SamplingParams.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def load_gguf(path: Path) -> LoadedModel:
    """Open the model in the GGUF file at `path`.

    Raises:
        ModelLoadError: the file is missing, broken or incomplete.
        UnsupportedModelError: a model that is not computed here.
    """
    file = GGUFFile(path)
    metadata = file.metadata
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(_dequantize(file, "rope_freqs.weight").tolist())
    described = GGUFMetadata(values=metadata, has_output="output.weight" in file.tensors, rope_divisors=divisors)
    try:
        checkpoint = find_gguf(metadata.get("general.architecture"))
        config = read_spec(checkpoint, described, "the GGUF file's metadata")
        tokenizer = tokenizer_from_gguf(metadata)
    except ModelLoadError as error:
        raise type(error)(f"{path}: {error}") from error
    source = metadata.get("tokenizer.chat_template")
    template = None
    if source:
        template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return LoadedModel(
        config=config,
        weights=CheckpointWeights(GGUFReader(file), checkpoint.weights, config),
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=eos_token_ids_from_gguf(metadata),
        sampling_defaults=_sampling_defaults(metadata),
    )


class GGUFReader:
    """The tensors of a GGUF file, decoded to float32 one at a time.

    Args:
        file: the open file.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._file = file

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`; ModelLoadError if it is missing or cut off."""
        return torch.from_numpy(_dequantize(self._file, name))


def _dequantize(file: GGUFFile, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The tensor as float32 in torch's shape."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    info = file.tensors.get(name)
    if info is None:
        raise ModelLoadError(f"{file.path}: the weights lack {name}")
    try:
        kind = GGMLQuantizationType(info.type_id)
    except ValueError:
        kind = None
    if kind is None or kind.name not in SUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{file.path}: {name} is quantized as {kind.name if kind else info.type_id}; supported are "
            f"{', '.join(SUPPORTED_TYPES)}"
        )
    block_size, bytes_per_block = GGML_QUANT_SIZES[kind]
    if not info.shape or info.shape[-1] % block_size:
        raise ModelLoadError(f"{file.path}: {name} has shape {info.shape}, not in blocks of {block_size}")
    num_bytes = math.prod(info.shape) // block_size * bytes_per_block
    raw = file.raw(info, num_bytes).reshape(*info.shape[:-1], -1)
    if kind is GGMLQuantizationType.F32:
        return raw.view(np.float32).copy()
    values: np.ndarray[Any, np.dtype[np.float32]] = quants.dequantize(raw, kind)
    return values.astype(np.float32, copy=False)


def _sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}
