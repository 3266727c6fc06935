"""Conversion between text and token ids: tokenizers, chat templates, stop strings. Imports no torch."""

from treadle.text.chat_template import ChatTemplate
from treadle.text.detokenizer import IncrementalDetokenizer
from treadle.text.stop_strings import StopStringMatcher
from treadle.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopStringMatcher", "Tokenizer"]
