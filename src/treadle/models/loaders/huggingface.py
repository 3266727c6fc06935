"""Reads a folder in Hugging Face's layout: config.json, safetensors (sharded or not), tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import safetensors
import torch

from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.core.metadata import ModelMetadata
from treadle.models.architectures import find_huggingface
from treadle.models.loaders.base import (
    CheckpointWeights,
    LoadedModel,
    all_eos_token_ids,
    read_sampling_defaults,
    read_spec,
)
from treadle.text import ChatTemplate, Tokenizer

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SUPPORTED_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def load_huggingface(folder: Path) -> LoadedModel:
    """Open the model in `folder`.

    Raises:
        ModelLoadError: a file is missing or cannot be read.
        UnsupportedModelError: a model that Treadle cannot compute.
    """
    values = _read_json(folder / "config.json")
    checkpoint = find_huggingface(values.texts("architectures"), values.source)
    _refuse_quantized(values)
    config = read_spec(checkpoint, values, values.source)
    generation = _read_json(folder / "generation_config.json", missing_ok=True)
    tokenizer_config = _read_json(folder / "tokenizer_config.json", missing_ok=True)
    weights = CheckpointWeights(SafetensorsReader(folder), checkpoint.weights, config)
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(f"{folder}: there is no tokenizer.json")
    tokenizer = Tokenizer.from_file(
        folder / "tokenizer.json",
        bos_token=_token_text(tokenizer_config, "bos_token"),
        eos_token=_token_text(tokenizer_config, "eos_token"),
    )
    template = _chat_template(folder, tokenizer_config, tokenizer)
    named = _eos_token_ids(generation, values, tokenizer, config.vocab_size)
    return LoadedModel(
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=all_eos_token_ids(named, tokenizer, template, config.vocab_size),
        sampling_defaults=_sampling_defaults(generation),
    )


class SafetensorsReader:
    """The tensors of a folder's *.safetensors files.

    Args:
        folder: with model.safetensors, or shards and model.safetensors.index.json.

    Attributes:
        path: of the folder.

    Raises:
        ModelLoadError: a file is missing or damaged, or two files contain the same tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files: dict[str, Any] = {}
        for path in _safetensors_paths(folder):
            try:
                file: Any = safetensors.safe_open(str(path), framework="pt")
                names = file.keys()
            except Exception as error:  # safetensors' own error type, or an OSError
                raise ModelLoadError(f"{path}: cannot be read as safetensors ({error})") from error
            for name in names:
                if name in self._files:
                    raise ModelLoadError(f"{path}: another file of the folder also contains {name}")
                self._files[name] = file

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`.

        Raises:
            ModelLoadError: it is missing.
            UnsupportedModelError: it does not consist of floats.
        """
        file = self._files.get(name)
        if file is None:
            raise ModelLoadError(f"{self.path}: the weights lack {name}")
        described = file.get_slice(name)
        dtype = described.get_dtype()
        if dtype not in SUPPORTED_DTYPES:
            raise UnsupportedModelError(
                f"{self.path}: {name} has dtype {dtype}; supported are {', '.join(SUPPORTED_DTYPES)}"
            )
        return tuple(described.get_shape())

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`; raises like `shape`."""
        self.shape(name)
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def block_format(self, name: str) -> str | None:
        """Always None: quantized checkpoints are refused."""
        return None

    def blocks(self, name: str) -> torch.Tensor:
        """Not called, since no tensor has a block format."""
        raise NotImplementedError


def _safetensors_paths(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelLoadError(f"{folder}: there are no .safetensors files")
        return paths
    weight_map = _read_json(index).section("weight_map")
    if not weight_map:
        raise ModelLoadError(f"{index} lacks 'weight_map'")
    names = {weight_map.text(name) for name in weight_map}
    for name in sorted(names):
        if Path(name).name != name:
            raise ModelLoadError(f"{index}: weight_map must name files of the folder, got {name!r}")
    return [folder / name for name in sorted(names)]


def _refuse_quantized(config: ModelMetadata) -> None:
    if config.get("quantization_config"):
        method = config.section("quantization_config").get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"weights quantized by {method!r} are not supported; supported are plain safetensors and GGUF"
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent}: there is no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read ({error})") from error


def _read_json(path: Path, missing_ok: bool = False) -> ModelMetadata:
    """The object in a JSON file; empty if the file is missing and may be."""
    if missing_ok and not path.is_file():
        return ModelMetadata({}, str(path))
    text = _read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: is not a JSON object")
    return ModelMetadata(content, str(path))


def _token_text(tokenizer_config: ModelMetadata, key: str) -> str | None:
    """A special token is written as text, or as an object with `content`; None if there is none."""
    if isinstance(tokenizer_config.get(key), dict):
        return tokenizer_config.section(key).text("content")
    return tokenizer_config.text(key) if tokenizer_config.has(key) else None


def _chat_template(folder: Path, tokenizer_config: ModelMetadata, tokenizer: Tokenizer) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    source = _read_text(file) if file.is_file() else _template_of_config(tokenizer_config)
    if not source:
        return None
    return ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, origin=str(folder))


def _template_of_config(config: ModelMetadata) -> str:
    value = config.get("chat_template")
    if not isinstance(value, list):
        return config.text("chat_template", "")
    for i, entry in enumerate(value):  # several named templates
        if not isinstance(entry, dict):
            raise config.error(f"chat_template[{i}]", "an object", entry)
        named = ModelMetadata(entry, f"{config.source}: chat_template[{i}]")
        if named.text("name") == "default":
            return named.text("template")
    return ""


def _eos_token_ids(
    generation: ModelMetadata, config: ModelMetadata, tokenizer: Tokenizer, vocab_size: int
) -> list[int]:
    """The ids that the three files name; often one of them names the end of text and another the end of a turn."""
    ids = [token_id for file in (generation, config) for token_id in file.token_ids("eos_token_id", vocab_size)]
    if tokenizer.eos_token is not None:
        token_id = tokenizer.token_id(tokenizer.eos_token)
        ids += [] if token_id is None or token_id >= vocab_size else [token_id]
    return ids


def _sampling_defaults(generation: ModelMetadata) -> dict[str, Any]:
    if not generation.flag("do_sample", True):
        return {"temperature": 0.0}
    return read_sampling_defaults(generation, {name: name for name in SAMPLING_FIELDS})
