"""What defines an architecture: how to read a ModelSpec from a checkpoint, and what its weights are called."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from treadle.core.metadata import ModelMetadata
from treadle.models.gguf_metadata import GGUFMetadata
from treadle.models.spec import ModelSpec

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Where a checkpoint stores the weights, which the forward passes request by Hugging Face's names for Llama.

    Those are `model.embed_tokens`, `model.norm`, `lm_head` and, with `model.layers.{}.` in front,
    `input_layernorm`, `self_attn.{q,k,v,o}_proj`, `self_attn.{q,k}_norm`, `post_attention_layernorm` and
    `mlp.{gate,up,down}_proj`; `.weight` or `.bias` follows.

    Attributes:
        names: name → the checkpoint's name, both without `.weight` and with `{}` for the layer's number.
            The checkpoint uses the same name for a weight that is not listed.
        convert: (name, the checkpoint's tensor, spec) → the tensor that the forward passes expect, for checkpoints
            that order a tensor's rows differently or store several tensors in one; None if none of them do. It is
            also called with tensors on the device "meta", which have a shape and no values, to check all shapes
            before any weight is read.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    convert: Callable[[str, torch.Tensor, ModelSpec], torch.Tensor] | None = None

    def name_of(self, name: str) -> str:
        """The checkpoint's name for the weight `name`."""
        stem, _, kind = name.rpartition(".")
        layer = _LAYER.search(stem)
        pattern = stem if layer is None else f"{stem[: layer.start()]}{{}}{stem[layer.end() :]}"
        if pattern not in self.names:
            return name
        number = "" if layer is None else layer[0]
        return f"{self.names[pattern].replace('{}', number)}.{kind}"


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat(Generic[Metadata]):
    """How checkpoints of one format represent an architecture.

    Attributes:
        name: the architecture's name in them: an entry of `architectures` in config.json, or
            `general.architecture` in GGUF.
        spec: reads the spec from their metadata. The getters of ModelMetadata raise ModelLoadError for a missing or
            invalid value; other exceptions (KeyError, TypeError, ValueError, …) also become ModelLoadErrors that name
            the file.
        weights: what they call the weights.
    """

    name: str
    spec: Callable[[Metadata], ModelSpec]
    weights: WeightMap = field(default_factory=WeightMap)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture that Treadle can load.

    Attributes:
        huggingface: its representation in Hugging Face's layout; the metadata is the content of config.json.
        gguf: its representation in GGUF; None if there is none, or if GGUF files declare another architecture.
    """

    huggingface: CheckpointFormat[ModelMetadata]
    gguf: CheckpointFormat[GGUFMetadata] | None = None
