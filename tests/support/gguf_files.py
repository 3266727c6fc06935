"""Writes small GGUF files, and transformers' model of the same weights."""

import gguf
import numpy as np
import torch
import transformers

VOCAB = 32


def _pair_neighbours(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows from halves (i, i + d/2) to neighbours (2i, 2i + 1), as llama.cpp stores queries and keys."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    neighbours = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return neighbours.swapaxes(1, 2).reshape(weight.shape)


def _quantized(rng, shape, kind):
    """Return the bytes of a random tensor of type `kind`, and the values that they encode."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    values = rng.normal(0.0, 0.06, shape).astype(np.float32)
    try:
        raw = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        # The gguf package cannot quantize to K-quants: use random bytes, with scales small enough for weights.
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
        blocks = raw.reshape(-1, size)
        scale = np.array([0.002], dtype=np.float16).view(np.uint8)
        starts = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (size - 2,)}.get(kind.name, (0,))
        for start in starts:
            blocks[:, start : start + 2] = scale
        raw = blocks.reshape(raw.shape)
    if kind is gguf.GGMLQuantizationType.F32:
        return raw, values
    return raw, gguf.quants.dequantize(raw, kind).astype(np.float32)


def write_llama_gguf(path, kind, *, kinds=None, llama3_rope=False):
    """Write a one-layer Llama; return transformers' model of it.

    Args:
        kind: type of the matrices that `kinds` does not name.
        kinds: GGUF's name of a matrix, without ".weight" → its type.
    """
    kinds = kinds or {}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if llama3_rope:
        rope = {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, rope_parameters=rope,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(7)
    state = {}
    matrices = {
        "model.embed_tokens.weight": ("token_embd.weight", (VOCAB, 256), 0),
        "lm_head.weight": ("output.weight", (VOCAB, 256), 0),
        "model.layers.0.self_attn.q_proj.weight": ("blk.0.attn_q.weight", (256, 256), 4),
        "model.layers.0.self_attn.k_proj.weight": ("blk.0.attn_k.weight", (128, 256), 2),
        "model.layers.0.self_attn.v_proj.weight": ("blk.0.attn_v.weight", (128, 256), 0),
        "model.layers.0.self_attn.o_proj.weight": ("blk.0.attn_output.weight", (256, 256), 0),
        "model.layers.0.mlp.gate_proj.weight": ("blk.0.ffn_gate.weight", (512, 256), 0),
        "model.layers.0.mlp.up_proj.weight": ("blk.0.ffn_up.weight", (512, 256), 0),
        "model.layers.0.mlp.down_proj.weight": ("blk.0.ffn_down.weight", (256, 512), 0),
    }
    for name, (gguf_name, shape, heads) in matrices.items():
        own_kind = kinds.get(gguf_name.removesuffix(".weight"), kind)
        raw, values = _quantized(rng, shape, own_kind)
        writer.add_tensor(gguf_name, raw, raw_dtype=own_kind)
        # The file stores rows as neighbours; the transformers model uses halves.
        state[name] = torch.from_numpy(_halves(values, heads) if heads else values)
        if heads:
            assert np.array_equal(_pair_neighbours(state[name].numpy(), heads), values)
    norms = {
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    }
    for name, gguf_name in norms.items():
        values = rng.uniform(0.5, 1.5, 256).astype(np.float32)
        writer.add_tensor(gguf_name, values)
        state[name] = torch.from_numpy(values)
    if llama3_rope:
        plain = 1.0 / (10000.0 ** (np.arange(0, 64, 2) / 64))
        scaled = model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    model.load_state_dict(state)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
