"""Which LoRA adapter a request is for."""

from dataclasses import dataclass

from treadle.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter (Hu et al. 2021) by name, as in vLLM.

    Attributes:
        lora_name: what users call it.
        lora_int_id: its number, from 1; requests with the same number run with the same adapter.
        lora_path: where its weights lie.
        version: changes when the weights do, so that KV of the old ones is not taken for KV of the new.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequestError("lora_int_id", f"must be an integer from 1, got {self.lora_int_id!r}")
        if not self.lora_name:
            raise InvalidRequestError("lora_name", "must not be empty")
