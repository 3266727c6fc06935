"""What an architecture's file says: how to read a ModelSpec from a checkpoint, and what its weights are called."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from treadle.models.gguf_metadata import GGUFMetadata
from treadle.models.spec import ModelSpec

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Where a checkpoint keeps what the forward passes ask for by Hugging Face's names of Llama's weights.

    Those are `model.embed_tokens`, `model.norm`, `lm_head` and, with `model.layers.{}.` in front,
    `input_layernorm`, `self_attn.{q,k,v,o}_proj`, `self_attn.{q,k}_norm`, `post_attention_layernorm` and
    `mlp.{gate,up,down}_proj`; `.weight` or `.bias` follows.

    Attributes:
        names: name → the checkpoint's name, both without `.weight` and with `{}` for the layer's number.
            A name that is not here is the checkpoint's own.
        convert: (name, the checkpoint's tensor, spec) → the tensor that the forward passes expect, for
            checkpoints that store one in another order or several in one; None if the tensors are the same.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    convert: Callable[[str, torch.Tensor, ModelSpec], torch.Tensor] | None = None

    def name_of(self, name: str) -> str:
        """The checkpoint's name of the weight `name`."""
        stem, _, kind = name.rpartition(".")
        layer = _LAYER.search(stem)
        pattern = stem if layer is None else f"{stem[: layer.start()]}{{}}{stem[layer.end() :]}"
        if pattern not in self.names:
            return name
        number = "" if layer is None else layer[0]
        return f"{self.names[pattern].replace('{}', number)}.{kind}"


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat(Generic[Metadata]):
    """How checkpoints of one kind hold an architecture.

    Attributes:
        name: what they call it: an entry of `architectures` in config.json, or GGUF's `general.architecture`.
        spec: reads the spec from their metadata. May raise KeyError for what is missing, TypeError and
            ArithmeticError for what makes no sense, and ModelLoadError with a message of its own.
        weights: what they call the weights.
    """

    name: str
    spec: Callable[[Metadata], ModelSpec]
    weights: WeightMap = field(default_factory=WeightMap)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture that Treadle can load.

    Attributes:
        huggingface: how folders in Hugging Face's layout hold it; the metadata is the content of config.json.
        gguf: how GGUF files hold it; None if there are none, or if they call it another architecture.
    """

    huggingface: CheckpointFormat[Mapping[str, Any]]
    gguf: CheckpointFormat[GGUFMetadata] | None = None
