"""Minimal valid model files, as data that a test can change before it writes them."""

import json
import struct

import numpy as np
import safetensors.numpy

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 8, 12, 2, 1, 4
CONTROL = ["<unk>", "<s>", "</s>", "<|eot_id|>"]
TOKENS = [*CONTROL, *"abcdefghijkl"]
VOCAB = len(TOKENS)

# GGUF's types of metadata values and of tensors.
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
F32, F16 = 0, 1


def weights():
    """GGUF's name → (Hugging Face's name, values)."""
    rng = np.random.default_rng(3)
    layer = "model.layers.0."
    shapes = {
        "token_embd": ("model.embed_tokens", (VOCAB, HIDDEN)),
        "output": ("lm_head", (VOCAB, HIDDEN)),
        "output_norm": ("model.norm", (HIDDEN,)),
        "blk.0.attn_norm": (layer + "input_layernorm", (HIDDEN,)),
        "blk.0.ffn_norm": (layer + "post_attention_layernorm", (HIDDEN,)),
        "blk.0.attn_q": (layer + "self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_k": (layer + "self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_v": (layer + "self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "blk.0.attn_output": (layer + "self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
        "blk.0.ffn_gate": (layer + "mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
        "blk.0.ffn_up": (layer + "mlp.up_proj", (INTERMEDIATE, HIDDEN)),
        "blk.0.ffn_down": (layer + "mlp.down_proj", (HIDDEN, INTERMEDIATE)),
    }
    return {
        f"{name}.weight": (f"{other}.weight", rng.uniform(0.1, 0.5, shape).astype(np.float32))
        for name, (other, shape) in shapes.items()
    }


def gguf_fields():
    """Metadata of a GGUF file: key → (type, value). The type of an array is (ARRAY, type of its elements)."""
    return {
        "general.architecture": (STRING, "llama"),
        "general.alignment": (UINT32, 32),
        "llama.block_count": (UINT32, 1),
        "llama.context_length": (UINT32, 64),
        "llama.embedding_length": (UINT32, HIDDEN),
        "llama.feed_forward_length": (UINT32, INTERMEDIATE),
        "llama.attention.head_count": (UINT32, HEADS),
        "llama.attention.head_count_kv": (UINT32, KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
        "llama.rope.freq_base": (FLOAT32, 10000.0),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.tokens": ((ARRAY, STRING), TOKENS),
        "tokenizer.ggml.token_type": ((ARRAY, UINT32), [2, 3, 3, 3, *[1] * (VOCAB - len(CONTROL))]),
        "tokenizer.ggml.merges": ((ARRAY, STRING), []),
        "tokenizer.ggml.bos_token_id": (UINT32, 1),
        "tokenizer.ggml.eos_token_id": (UINT32, 2),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.chat_template": (STRING, "{% for m in messages %}{{ m.content }}</s>{% endfor %}"),
    }


def gguf_tensors():
    """Tensors of a GGUF file: [(name, shape in torch's order, type, offset, bytes)]."""
    tensors, offset = [], 0
    for name, (_, values) in weights().items():
        tensors.append((name, values.shape, F32, offset, values.tobytes()))
        offset += -(-values.nbytes // 32) * 32
    return tensors


def gguf_bytes(fields, tensors):
    """Write a GGUF file from `gguf_fields` and `gguf_tensors`, which a test may have changed."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, (kind, value) in fields.items():
        header += _string(key) + _field(kind, value)
    for name, shape, kind, offset, _ in tensors:
        header += _string(name) + struct.pack("<I", len(shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", kind, offset)
    data = bytearray(-(-len(header) // 32) * 32)
    data[: len(header)] = header
    start = len(data)
    for _, _, _, offset, raw in tensors:
        if offset < 2**20:  # a test may declare a larger tensor than it writes
            data += bytes(max(0, start + offset + len(raw) - len(data)))
            data[start + offset : start + offset + len(raw)] = raw
    return bytes(data)


def _field(kind, value):
    if isinstance(kind, tuple):
        inner = kind[1]
        return struct.pack("<IIQ", ARRAY, inner, len(value)) + b"".join(_scalar(inner, item) for item in value)
    return struct.pack("<I", kind) + _scalar(kind, value)


def _scalar(kind, value):
    if kind == STRING:
        return _string(value)
    if isinstance(value, bytes):  # the payload itself
        return value
    codes = "BbHhIif?  QqdQ"
    return struct.pack("<" + codes[kind], value)


def _string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def huggingface_files():
    """Content of a folder in Hugging Face layout: file → object (JSON), text or bytes."""
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
        "generation_config.json": {"eos_token_id": [2], "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": True},
            "chat_template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                    "normalized": False, "special": True,
                }
                for i, token in enumerate(CONTROL)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(TOKENS)}, "merges": [],
            },
        },
        "model.safetensors": safetensors.numpy.save(dict(weights().values())),
    }  # fmt: skip


def write_folder(folder, files):
    """Write a folder from `huggingface_files`, which a test may have changed."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder
