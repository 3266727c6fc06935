"""What every loader returns, and the checks that all of them make."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from treadle.core.errors import InvalidRequestError, ModelLoadError
from treadle.core.metadata import ModelMetadata
from treadle.core.sampling_params import SamplingParams
from treadle.models.architecture import CheckpointFormat, Metadata, WeightMap
from treadle.models.spec import ModelSpec, weight_shapes
from treadle.text import ChatTemplate, Tokenizer
from treadle.text.end_of_turn import end_token_ids


class WeightSource(Protocol):
    """Weights by Hugging Face's names for Llama (see WeightMap), read one at a time."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` in `dtype`; ModelLoadError if it is missing, misshapen or not finite."""
        ...

    def block_format(self, name: str) -> str | None:
        """GGUF's name of the block format in which the tensor is stored, such as "Q4_K"; None if it is in none."""
        ...

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The blocks of a tensor that has a block format: uint8 [rows, row_bytes]; raises as `get` does.

        The blocks are not checked for numbers that are not finite.
        """
        ...

    def damaged(self, name: str, problem: str) -> ModelLoadError:
        """The error for a tensor whose values cannot be used; `problem` follows the tensor's name."""
        ...


class TensorReader(Protocol):
    """The tensors of a model's files by their own names.

    Attributes:
        path: of the file or folder.
    """

    path: Path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`, without reading it.

        Raises:
            ModelLoadError: there is none.
            UnsupportedModelError: its type cannot be read.
        """
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, floats of any width; raises like `shape`, and ModelLoadError if reading fails."""
        ...

    def block_format(self, name: str) -> str | None:
        """GGUF's name of the tensor's block format, None if it is in none; raises like `shape`."""
        ...

    def blocks(self, name: str) -> torch.Tensor:
        """The blocks of such a tensor: uint8 [*shape[:-1], row_bytes]; raises like `shape`."""
        ...


class CheckpointWeights:
    """WeightSource over a model's files.

    Args:
        tensors: of the files.
        weights: their names and layouts.
        spec: of the model.

    Raises:
        ModelLoadError: a weight that the model needs is missing or has another shape. No weight is read for this.
        UnsupportedModelError: a weight's type cannot be read.
    """

    def __init__(self, tensors: TensorReader, weights: WeightMap, spec: ModelSpec) -> None:
        self._tensors = tensors
        self._map = weights
        self._spec = spec
        for name, shape in weight_shapes(spec):
            own_name = weights.name_of(name)
            self._convert(name, own_name, torch.empty(tensors.shape(own_name), device="meta"), shape)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` in `dtype`; ModelLoadError if it is missing, misshapen or not finite in `dtype`."""
        own_name = self._map.name_of(name)
        tensor = self._convert(name, own_name, self._tensors.read(own_name), shape).to(dtype)
        least, greatest = torch.aminmax(tensor)  # both NaN if an element is
        if not (torch.isfinite(least) and torch.isfinite(greatest)):
            num_bad = int(tensor.numel() - torch.isfinite(tensor).sum())
            type_name = str(dtype).removeprefix("torch.")
            raise self.damaged(
                name,
                f"has {num_bad} values that are NaN or infinite in {type_name}; "
                f"the file is damaged, or needs a wider dtype",
            )
        return tensor

    def block_format(self, name: str) -> str | None:
        """GGUF's name of the block format of the tensor `name`, None if it is in none."""
        return self._tensors.block_format(self._map.name_of(name))

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The blocks of the tensor `name`, in the order of its rows: uint8 [rows, row_bytes]."""
        own_name = self._map.name_of(name)
        blocks = self._tensors.blocks(own_name)
        return self._convert(name, own_name, blocks, (*shape[:-1], blocks.shape[-1]))

    def damaged(self, name: str, problem: str) -> ModelLoadError:
        """The error for a tensor whose values cannot be used; `problem` follows the file's and the tensor's name."""
        return ModelLoadError(f"{self._tensors.path}: {self._map.name_of(name)} {problem}")

    def _convert(self, name: str, own_name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        found = f"{self._tensors.path}: {own_name} has shape {tuple(tensor.shape)}"
        if self._map.convert is not None:
            try:
                tensor = self._map.convert(name, tensor, self._spec)
            except (RuntimeError, ValueError, IndexError) as error:
                raise ModelLoadError(f"{found}, from which {name} cannot be taken ({error})") from error
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"{found}, the config needs {shape}")
        return tensor


def read_spec(checkpoint: CheckpointFormat[Metadata], metadata: Metadata, source: str) -> ModelSpec:
    """The spec that an architecture reads from a model's metadata.

    Args:
        checkpoint: how the architecture is read.
        metadata: what it is read from.
        source: the file, in messages.

    Raises:
        ModelLoadError: a value is missing or invalid.
        UnsupportedModelError: a variant that a spec cannot express.
    """
    try:
        return checkpoint.spec(metadata)
    except ModelLoadError as error:
        if str(error).startswith(source):
            raise
        raise type(error)(f"{source}: {error}") from error
    except KeyError as error:
        raise ModelLoadError(f"{source} lacks {error.args[0]!r}") from None
    except Exception as error:  # the code of another package
        raise ModelLoadError(f"{source}: no model can be made of it ({error!r})") from error


def all_eos_token_ids(
    named: Iterable[int], tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> frozenset[int]:
    """Every id that ends a sequence.

    Args:
        named: ids that the model's files name.
        tokenizer, template: of the model; their end tokens are added, as far as the model can produce them.
        vocab_size: of the model.
    """
    found = end_token_ids(tokenizer, template)
    return frozenset(named) | {token_id for token_id in found if token_id < vocab_size}


def read_sampling_defaults(metadata: ModelMetadata, names: Mapping[str, str]) -> dict[str, Any]:
    """The sampling parameters that a model's files recommend.

    Args:
        metadata: of the file.
        names: key of the file → SamplingParams' name.

    Raises:
        ModelLoadError: a value that SamplingParams does not accept.
    """
    found = {}
    for key, name in names.items():
        if metadata.has(key):
            try:
                SamplingParams(**{name: metadata[key]})
            except InvalidRequestError as error:
                raise ModelLoadError(f"{metadata.source}: {key} {error.problem}") from error
            found[name] = metadata[key]
    return found


@dataclass(frozen=True)
class LoadedModel:
    """A model whose files are open and checked; weights are read when they are requested.

    Attributes:
        config: what it is made of.
        weights: its tensors.
        tokenizer: of the model.
        chat_template: None if it has none.
        eos_token_ids: every id that ends a sequence, each below `config.vocab_size`.
        sampling_defaults: sampling parameters that the model's files recommend, by SamplingParams' names.
    """

    config: ModelSpec
    weights: WeightSource
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
