"""Rebuilds a tokenizer from the metadata of a GGUF file.

GGUF stores the vocabulary, merges and scores, and the name of the pre-tokenizer that splits a text into words
(`tokenizer.ggml.pre`); the pre-tokenizers defined here are those that the models were trained with.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.core.metadata import ModelMetadata
from treadle.text.tokenizer import Tokenizer

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

MAX_PIECE_LENGTH = 512
"""Characters of the longest SentencePiece piece that merges lead to; by default, training makes none above 16."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(words: str | None) -> pre_tokenizers.PreTokenizer:
    if words is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(None)])


# tokenizer.ggml.pre → pre-tokenizer; whether words in the vocabulary skip the merges; whether text is
# NFC-normalized; whether BOS is added by default.
_PRE_TOKENIZERS: dict[str, tuple[Any, bool, bool, bool]] = {
    "default": (lambda: _byte_level(None), False, False, False),
    "gpt-2": (lambda: _byte_level(None), False, False, False),
    "smollm": (_smollm, False, False, False),
    "llama-bpe": (lambda: _byte_level(_LLAMA3_WORDS), True, False, True),
    "llama3": (lambda: _byte_level(_LLAMA3_WORDS), True, False, True),
    "smaug-bpe": (lambda: _byte_level(_LLAMA3_WORDS), True, False, True),
    "qwen2": (lambda: _byte_level(_QWEN2_WORDS), False, True, False),
    "tekken": (lambda: _byte_level(_TEKKEN_WORDS), True, False, True),
}


def tokenizer_from_gguf(metadata: ModelMetadata) -> Tokenizer:
    """Build the tokenizer that the metadata of a GGUF file describes.

    Raises:
        ModelLoadError: the metadata is incomplete or inconsistent.
        UnsupportedModelError: the kind of tokenizer or the pre-tokenizer is not supported.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError(f"{metadata.source}: there is no vocabulary (tokenizer.ggml.tokens)")
    kind = metadata.text("tokenizer.ggml.model")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelLoadError(f"{metadata.source}: tokenizer.ggml.tokens contains {twice!r} twice")
    types = metadata.integers("tokenizer.ggml.token_type", length=len(tokens))
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, vocab)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata, vocab, types)
    else:
        raise UnsupportedModelError(
            f"{metadata.source}: tokenizer.ggml.model {kind!r} is not supported; supported are 'gpt2' (byte-level "
            f"BPE) and 'llama' (SentencePiece BPE)"
        )
    backend.add_special_tokens([_added(tokens[i]) for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)])
    backend.add_tokens([_added(tokens[i]) for i, kind in enumerate(types) if kind == _USER_DEFINED])
    bos, eos = _special(metadata, tokens, "bos"), _special(metadata, tokens, "eos")
    before = [bos] if bos and metadata.flag("tokenizer.ggml.add_bos_token", add_bos) else []
    after = [eos] if eos and metadata.flag("tokenizer.ggml.add_eos_token", False) else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(token, vocab[token]) for token in {*before, *after}],
        )
    return Tokenizer(backend, bos_token=bos, eos_token=eos)


def eos_token_ids_from_gguf(metadata: ModelMetadata, vocab_size: int) -> frozenset[int]:
    """The ids that the metadata names as end of text, of turn or of message; ModelLoadError for one outside the
    vocabulary."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return frozenset(metadata.integer(key, minimum=0, maximum=vocab_size - 1) for key in keys if metadata.has(key))


def _byte_level_bpe(metadata: ModelMetadata, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{metadata.source}: tokenizer.ggml.pre {name!r} is not supported; supported are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    pre_tokenizer, ignore_merges, nfc, add_bos = _PRE_TOKENIZERS[name]
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in metadata.texts("tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab, merges, ignore_merges=ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelLoadError(
            f"{metadata.source}: tokenizer.ggml.merges must be pairs of tokens that make a token ({error})"
        ) from error
    backend = tokenizers.Tokenizer(model)
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, add_bos


def _sentencepiece_bpe(
    metadata: ModelMetadata, vocab: dict[str, int], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    scores = metadata.numbers("tokenizer.ggml.scores", length=len(vocab))
    if not scores:
        raise ModelLoadError(f"{metadata.source}: there are no token scores (tokenizer.ggml.scores)")
    unknown = next((token for token, i in vocab.items() if types and types[i] == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, _merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    add_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: every split of a piece into two pieces, best score first.

    The work is quadratic in the length of a piece, so longer ones than MAX_PIECE_LENGTH are left out.
    """
    merges = []
    for token, i in vocab.items():
        if len(token) > MAX_PIECE_LENGTH:
            continue
        splits = [(token[:k], token[k:]) for k in range(1, len(token))]
        splits = [(left, right) for left, right in splits if left in vocab and right in vocab]
        splits.sort(key=lambda split: (vocab[split[0]], vocab[split[1]]))
        merges += [(-scores[i], split) for split in splits]
    merges.sort(key=lambda merge: merge[0])
    return [split for _, split in merges]


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _special(metadata: ModelMetadata, tokens: list[str], name: str) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return tokens[metadata.integer(key, minimum=0, maximum=len(tokens) - 1)] if metadata.has(key) else None
