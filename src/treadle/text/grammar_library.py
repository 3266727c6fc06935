"""What is asked of llguidance, the library behind structured outputs, and within which limits.

Compiling recurses as deep as a grammar is nested, and a stack that is too small ends the process. So grammars are
compiled in a process of their own first (`grammar_process`), on a smaller stack than here. Computing masks does not
recurse.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions

FORCED_CHARS = 1024
"""How much of a text that is certain is tokenized exactly; the next token is far from the end of it."""


class TokenizerForGrammars:
    """A tokenizer as llguidance wants it (its TokenizerWrapper): one that never makes control tokens of text.

    Args:
        tokenizer: as `tokenizer.json` has it.
        vocab_size: number of logits.
        eos_token_ids: the model's.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        import llguidance

        parsed = json.loads(tokenizer)
        for token in parsed["added_tokens"]:
            token["special"] = token["special"] or token["id"] in eos_token_ids
        self._plain = llguidance.LLTokenizer(
            json.dumps(parsed), n_vocab=vocab_size, eos_token=eos_token_ids, slices=[]
        )
        self._exact = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        self._exact.encode_special_tokens = True
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [token["id"] for token in parsed["added_tokens"] if token["special"]]
        self.tokens = [self._plain.decode_bytes([i]) for i in range(vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text that is certain to come."""
        if isinstance(text, bytes):
            text = text.decode()
        ids: list[int] = self._exact.encode(text[:FORCED_CHARS], add_special_tokens=False).ids
        return ids + self._plain.greedy_tokenize(text[FORCED_CHARS:])


def make_vocabulary(tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> "llguidance.LLTokenizer":
    """The vocabulary in llguidance's form; arguments as of TokenizerForGrammars."""
    import llguidance

    wrapper = llguidance.TokenizerWrapper(TokenizerForGrammars(tokenizer, vocab_size, eos_token_ids))
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=eos_token_ids)


def compile_text(vocabulary: "llguidance.LLTokenizer", text: str) -> "llguidance.LLMatcher":
    """A matcher at the start of a text, with its first mask computed.

    Fuel is llguidance's unit of work on regular expressions, about 1 µs and 200 bytes each.

    Args:
        vocabulary: of the model.
        text: the grammar, as llguidance reads it.

    Raises:
        ValueError: the grammar is invalid, exceeds a limit, or allows no text.
    """
    import llguidance

    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=300_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False
    )
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        error = error_of(matcher)
        raise ValueError("no text satisfies it" if error.startswith("NoExtension") else error)
    return matcher


def try_first_token(matcher: "llguidance.LLMatcher") -> None:
    """Advance by a token, as generation will: some limits are noticed only then.

    Args:
        matcher: as `compile_text` returns it; it cannot be used afterwards.

    Raises:
        ValueError: the grammar exceeds a limit.
    """
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    matcher.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
    if not matcher.is_stopped():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"is too complex to follow ({error_of(matcher)}); simplify the grammar")


def error_of(matcher: "llguidance.LLMatcher") -> str:
    """Why the matcher failed, in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


def grammar_text(given: dict[str, Any]) -> str:
    """The grammar in llguidance's syntax.

    Args:
        given: fields of StructuredOutputsParams.

    Raises:
        Exception: of any kind; the grammar cannot be read.
    """
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    matcher = llguidance.LLMatcher
    if given["regex"] is not None:
        return matcher.grammar_from_regex(given["regex"])
    if given["choice"] is not None:
        return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in given["choice"]))
    if given["grammar"] is not None:
        try:
            return matcher.grammar_from_lark(any_to_lark(given["grammar"]))
        except RecursionError:
            raise
        except Exception as error:  # the converter raises whatever happens to it
            raise ValueError(f"cannot be read as Lark or GBNF: {error}") from error
    schema = {"type": "object"} if given["json"] is None else given["json"]
    if not isinstance(schema, str):
        schema = json.dumps(schema)
    if schema.strip() == "true":  # llguidance takes options only with an object
        schema = "{}"
    elif schema.strip() == "false":
        raise ValueError("the schema false allows no value")
    options: JsonCompileOptions = {"whitespace_flexible": not given["disable_any_whitespace"]}
    if given["whitespace_pattern"] is not None:
        options["whitespace_pattern"] = given["whitespace_pattern"]
    return matcher.grammar_from_json_schema(schema, overrides=options)
