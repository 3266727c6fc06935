"""Reads a GGUF file: its metadata as spec and tokenizer, its tensors decoded to float32."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.core.metadata import ModelMetadata
from treadle.models.architectures import find_gguf
from treadle.models.gguf_metadata import GGUFMetadata
from treadle.models.loaders.base import (
    CheckpointWeights,
    LoadedModel,
    all_eos_token_ids,
    read_sampling_defaults,
    read_spec,
)
from treadle.models.loaders.gguf_file import GGUFFile, TensorInfo
from treadle.text import ChatTemplate
from treadle.text.gguf_tokenizer import eos_token_ids_from_gguf, tokenizer_from_gguf

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SUPPORTED_TYPES = ("F32", "F16", "BF16", *BLOCK_TYPES)

# GGUF's keys → SamplingParams.
SAMPLING_FIELDS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def load_gguf(path: Path) -> LoadedModel:
    """Open the model in the GGUF file at `path`.

    Raises:
        ModelLoadError: the file is missing, damaged or incomplete.
        UnsupportedModelError: a model that Treadle cannot compute.
    """
    file = GGUFFile(path)
    tensors = GGUFReader(file)
    metadata = ModelMetadata(file.metadata, str(path))
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(tensors.read("rope_freqs.weight").flatten().tolist())
    described = GGUFMetadata(values=metadata, has_output="output.weight" in file.tensors, rope_divisors=divisors)
    checkpoint = find_gguf(metadata.text("general.architecture"), str(path))
    config = read_spec(checkpoint, described, str(path))
    weights = CheckpointWeights(tensors, checkpoint.weights, config)
    tokenizer = tokenizer_from_gguf(metadata)
    template = None
    if metadata.get("tokenizer.chat_template"):
        source = metadata.text("tokenizer.chat_template")
        template = ChatTemplate(
            source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, origin=str(path)
        )
    return LoadedModel(
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=all_eos_token_ids(
            eos_token_ids_from_gguf(metadata, config.vocab_size), tokenizer, template, config.vocab_size
        ),
        sampling_defaults=read_sampling_defaults(metadata, SAMPLING_FIELDS),
    )


class GGUFReader:
    """The tensors of a GGUF file, decoded to float32 one at a time.

    Args:
        file: the open file.

    Attributes:
        path: of the file.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._file = file
        self._previous: TensorInfo | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`.

        Raises:
            ModelLoadError: it is missing.
            UnsupportedModelError: its quantization is not supported.
        """
        return self._find(name)[0].shape

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`; raises like `shape`."""
        from gguf import GGMLQuantizationType, quants

        info, kind = self._find(name)
        raw = self._raw(info)
        if kind is GGMLQuantizationType.F32:
            return torch.from_numpy(raw.view(np.float32).copy())
        return torch.from_numpy(quants.dequantize(raw, kind).astype(np.float32, copy=False))

    def block_format(self, name: str) -> str | None:
        """The name of the tensor's block format, None if it is stored as floats; raises like `shape`."""
        type_name: str = self._find(name)[1].name
        return type_name if type_name in BLOCK_TYPES else None

    def blocks(self, name: str) -> torch.Tensor:
        """The tensor's blocks, uint8 [*shape[:-1], row_bytes], in the mapped file; raises like `shape`."""
        raw = self._raw(self._find(name)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the array is not writable, and nothing writes to it
            return torch.from_numpy(raw)

    def _raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        # Of the mapped file, one tensor at a time takes memory.
        if self._previous is not None:
            self._file.forget(self._previous)
        self._previous = info
        return self._file.raw(info)

    def _find(self, name: str) -> tuple[TensorInfo, Any]:
        """Where the tensor lies, and its GGMLQuantizationType."""
        from gguf import GGMLQuantizationType

        info = self._file.tensors.get(name)
        if info is None:
            raise ModelLoadError(f"{self.path}: the weights lack {name}")
        try:
            kind = GGMLQuantizationType(info.type_id)
        except ValueError:
            kind = None
        if kind is None or kind.name not in SUPPORTED_TYPES:
            type_name = f"type {info.type_id}" if kind is None else kind.name
            raise UnsupportedModelError(
                f"{self.path}: {name} is quantized as {type_name}; supported are {', '.join(SUPPORTED_TYPES)}"
            )
        return info, kind
