"""A small SentencePiece tokenizer with byte fallback, as GGUF metadata."""

from treadle.core.metadata import ModelMetadata


def sentencepiece_metadata(**changes) -> ModelMetadata:
    words = ["▁the", "▁cat", "▁sat", "▁", "▁t", "he", "at", "▁c", "▁s", "e", "t", "h", "c", "a", "s", "字"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return ModelMetadata(values | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, "model.gguf")
