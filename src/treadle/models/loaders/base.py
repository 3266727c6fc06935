"""What every reader of model files gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from treadle.core.errors import ModelLoadError
from treadle.models.architecture import CheckpointFormat, Metadata, WeightMap
from treadle.models.spec import ModelSpec
from treadle.text import ChatTemplate, Tokenizer


class WeightSource(Protocol):
    """Weights by Hugging Face's names of Llama's (see WeightMap), read one at a time."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` in `dtype`; ModelLoadError if it is missing or has another shape."""
        ...


class TensorReader(Protocol):
    """The tensors of a model's files by their own names.

    Attributes:
        path: of the file or folder.
    """

    path: Path

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, floats of any width; ModelLoadError if it is missing or cannot be read."""
        ...


class CheckpointWeights:
    """WeightSource over a model's files.

    Args:
        tensors: of the files.
        weights: where they keep what is asked for.
        spec: of the model.
    """

    def __init__(self, tensors: TensorReader, weights: WeightMap, spec: ModelSpec) -> None:
        self._tensors = tensors
        self._map = weights
        self._spec = spec

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` in `dtype`; ModelLoadError if it is missing or has another shape."""
        own_name = self._map.name_of(name)
        tensor = self._tensors.read(own_name)
        found = f"{self._tensors.path}: {own_name} has shape {tuple(tensor.shape)}"
        if self._map.convert is not None:
            try:
                tensor = self._map.convert(name, tensor, self._spec)
            except (RuntimeError, ValueError, IndexError) as error:
                raise ModelLoadError(f"{found}, from which {name} cannot be taken ({error})") from error
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"{found}, the config needs {shape}")
        return tensor.to(dtype)


def read_spec(checkpoint: CheckpointFormat[Metadata], metadata: Metadata, what: str) -> ModelSpec:
    """The spec that an architecture reads from a model's metadata.

    Args:
        checkpoint: how the architecture is read.
        metadata: what it is read from.
        what: the metadata, in messages.

    Raises:
        ModelLoadError: something is missing or makes no sense.
        UnsupportedModelError: a variant that a spec cannot express.
    """
    try:
        return checkpoint.spec(metadata)
    except KeyError as error:
        raise ModelLoadError(f"{what} lacks {error.args[0]!r}") from None
    except (TypeError, ArithmeticError) as error:
        raise ModelLoadError(f"{what} makes no sense ({error})") from error


@dataclass(frozen=True)
class LoadedModel:
    """A model's files, opened.

    Attributes:
        config: what it is made of.
        weights: its tensors.
        tokenizer: of the model.
        chat_template: None if it has none.
        eos_token_ids: every id that ends a sequence.
        sampling_defaults: sampling parameters that the model asks for, by SamplingParams' names.
    """

    config: ModelSpec
    weights: WeightSource
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
