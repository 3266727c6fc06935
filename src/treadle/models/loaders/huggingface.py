"""Reads a folder in Hugging Face's layout: config.json, safetensors (sharded or not), tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.models.architectures import find_huggingface
from treadle.models.loaders.base import CheckpointWeights, LoadedModel, read_spec
from treadle.text import ChatTemplate, Tokenizer

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_huggingface(folder: Path) -> LoadedModel:
    """Open the model in `folder`.

    Raises:
        ModelLoadError: a file is missing or cannot be read.
        UnsupportedModelError: a model that is not computed here.
    """
    raw = _read_json(folder / "config.json")
    checkpoint = find_huggingface(raw.get("architectures") or [])
    _refuse_quantized(raw)
    config = read_spec(checkpoint, raw, "config.json")
    generation = _read_json(folder / "generation_config.json", missing_ok=True)
    tokenizer_config = _read_json(folder / "tokenizer_config.json", missing_ok=True)
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(f"{folder}: there is no tokenizer.json")
    tokenizer = Tokenizer.from_file(
        folder / "tokenizer.json",
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=_token_text(tokenizer_config.get("eos_token")),
    )
    return LoadedModel(
        config=config,
        weights=CheckpointWeights(SafetensorsReader(folder), checkpoint.weights, config),
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, tokenizer_config, tokenizer),
        eos_token_ids=_eos_token_ids(generation, raw, tokenizer),
        sampling_defaults=_sampling_defaults(generation),
    )


class SafetensorsReader:
    """The tensors of all `*.safetensors` files of a folder.

    Args:
        folder: with model.safetensors, or shards and model.safetensors.index.json.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(_read_json(index).get("weight_map", {}).values()))
            paths = [folder / name for name in names]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelLoadError(f"{folder}: there are no .safetensors files")
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safetensors.safe_open(str(path), framework="pt")
                self._files.update(dict.fromkeys(file.keys(), file))
            except Exception as error:  # safetensors' own error type, or an OSError
                raise ModelLoadError(f"{path}: cannot be read as safetensors ({error})") from error

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`; ModelLoadError if it is missing or not made of floats."""
        file = self._files.get(name)
        if file is None:
            raise ModelLoadError(f"{self.path}: the weights lack {name}")
        tensor: torch.Tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{self.path}: {name} has dtype {tensor.dtype}, which is not a float")
        return tensor


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"weights quantized by {method!r} are not supported; supported are plain safetensors and GGUF"
        )


def _read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent}: there is no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: is not a JSON object")
    return content


def _token_text(token: Any) -> str | None:
    """A special token is written as text, or as an object with a `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if not source:
        return None
    return ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None and tokenizer.eos_token is not None:
        ids = tokenizer.token_id(tokenizer.eos_token)
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list) else frozenset((ids,))


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: generation[name] for name in SAMPLING_FIELDS if generation.get(name) is not None}
