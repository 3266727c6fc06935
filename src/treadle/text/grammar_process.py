"""A process in which grammars are compiled first: one that crashes or stalls there harms only its own request."""

from pathlib import Path
from typing import Any

from treadle.core.errors import InvalidRequestError
from treadle.core.limited_process import LimitedProcess, LimitExceeded, Limits, Work, WorkFailed, serve
from treadle.text.tokenizer import Tokenizer

FIELD = "structured_outputs"
LIMITS = Limits(cpu_s=3, wall_s=20.0, num_bytes=512 * 2**20, stack_bytes=8 * 2**20)
"""The stack bounds how deep a grammar may be nested. The parent must have more."""


class GrammarProcess(LimitedProcess):
    """The parent's end. Not thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of logits.
        eos_token_ids: the model's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        super().__init__(Path(__file__), LIMITS)
        self._tokenizer = tokenizer
        self._vocabulary_args = (vocab_size, eos_token_ids)

    def compile(self, params: str) -> str:
        """Check that a grammar can be compiled.

        Args:
            params: StructuredOutputsParams as JSON.

        Returns:
            The grammar, as llguidance reads it.

        Raises:
            InvalidRequestError: it is invalid, compiling it failed or took too much, or llguidance cannot use the
                tokenizer.
            EngineError: no process could be started.
        """
        if self.pid is None:
            try:
                self.start([self._tokenizer.backend.to_str(), *self._vocabulary_args])
            except WorkFailed as error:
                raise InvalidRequestError(FIELD, f"are not possible with this model's tokenizer ({error})") from None
        try:
            text: str = self.ask(params)["text"]
        except WorkFailed as error:
            raise InvalidRequestError(FIELD, str(error)) from None
        except LimitExceeded as error:
            raise InvalidRequestError(FIELD, f"{error} to compile; simplify the grammar") from None
        return text


def _prepare(setup: Any) -> Work:
    from treadle.text.grammar_library import compile_text, grammar_text, make_vocabulary, try_first_token

    vocabulary = make_vocabulary(*setup)

    def work(params: Any) -> dict[str, Any]:
        text = grammar_text(params)
        try_first_token(compile_text(vocabulary, text))
        return {"text": text}

    return work


if __name__ == "__main__":
    serve(_prepare, LIMITS)
