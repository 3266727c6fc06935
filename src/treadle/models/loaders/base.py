"""What every reader of model files gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from treadle.models.config import ModelConfig
from treadle.text import ChatTemplate, Tokenizer


class WeightSource(Protocol):
    """Weights by Hugging Face's names, read one at a time."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` in `dtype`; ModelLoadError if it is missing or has another shape."""
        ...


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

    config: ModelConfig
    weights: WeightSource
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
