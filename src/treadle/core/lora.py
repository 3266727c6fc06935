"""The LoRA adapter of a request."""

from dataclasses import dataclass

from treadle.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter (Hu et al. 2021) by name, as in vLLM.

    Attributes:
        lora_name: name of the adapter.
        lora_int_id: its number, at least 1; requests with the same number use the same adapter.
        lora_path: path of its weights.
        version: changes with the weights, so that KV of old weights is never reused for new ones.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequestError("lora_int_id", f"must be an integer of at least 1, got {self.lora_int_id!r}")
        if not self.lora_name:
            raise InvalidRequestError("lora_name", "must not be empty")
