"""Tiny models with random weights, saved by transformers."""

import random

import torch
import transformers
from tokenizers import Tokenizer, models

VOCAB = 320

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "tiny": ("Llama", {"hidden_size": 96, "intermediate_size": 160, "max_position_embeddings": 4096}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"head_dim": 10, "attention_bias": True}),
}


def write_tokenizer(folder):
    vocab = {f"<{i}>": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(vocab, unk_token="<0>")).save(str(folder / "tokenizer.json"))


def make_model(name, folder, scale=0.25, **save):
    family, changes = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        # Larger than the default initialization, biases and norms included, so that every part affects the output.
        for parameter in model.parameters():
            parameter.normal_(0.0, scale) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **save)
    write_tokenizer(folder)
    return model


def make_prompts(lengths, seed=0):
    """Return prompts of random token ids; every third one shares its prefix with the first."""
    rng = random.Random(seed)
    beginning = [rng.randrange(3, VOCAB) for _ in range(max(lengths))]
    return [
        beginning[:length] if i % 3 == 0 else [rng.randrange(3, VOCAB) for _ in range(length)]
        for i, length in enumerate(lengths)
    ]
