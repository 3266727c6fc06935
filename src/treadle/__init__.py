"""Treadle: an LLM inference engine built around its request scheduler.

`LLM` and `SamplingParams` are what most programs need. They are loaded on first use, so that packages
that need no torch (`treadle.scheduler`, `treadle.kvcache`, …) can be imported without it.
"""

from treadle._version import __version__

TYPE_CHECKING = False  # `typing` takes longer to import than all else here
if TYPE_CHECKING:
    from typing import Any

    from treadle.core.lora import LoRARequest
    from treadle.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from treadle.core.sampling_params import SamplingParams
    from treadle.core.structured_outputs import StructuredOutputsParams
    from treadle.llm import LLM, BeamSearchParams

_HOMES = {
    "LLM": "treadle.llm",
    "BeamSearchParams": "treadle.llm",
    "LoRARequest": "treadle.core.lora",
    "SamplingParams": "treadle.core.sampling_params",
    "StructuredOutputsParams": "treadle.core.structured_outputs",
    "RequestOutput": "treadle.core.outputs",
    "CompletionOutput": "treadle.core.outputs",
    "RequestMetrics": "treadle.core.outputs",
    "Logprob": "treadle.core.outputs",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
