"""The forward pass on the native CPU kernels: weights packed for them, bfloat16 or int8.

It interprets a ModelSpec and knows no architecture. The computation itself is in backends/cpu/csrc/step.h;
backends/torch/model.py is its plain torch twin.
"""

from collections.abc import Callable
from ctypes import Structure, byref

import numpy as np
import numpy.typing as npt
import torch

from treadle.backends.cpu.arena import ALIGNMENT, Arena, round_up
from treadle.backends.cpu.library import (
    GATES,
    GROUP,
    MAX_GROUP_SIZE,
    MAX_HEAD_DIM,
    PANEL,
    FloatArray,
    LayerStruct,
    Library,
    ModelStruct,
    StepStruct,
    WeightsStruct,
    pointer,
)
from treadle.core.errors import UnsupportedModelError
from treadle.core.request import IntArray
from treadle.models.loaders.base import WeightSource
from treadle.models.rope import rotary_tables
from treadle.models.spec import (
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RopeConfig,
    differing_layers,
    unsupported_property,
)

SUPPORTED = {
    "attention.kind": ("grouped-query",),
    "norm.kind": ("rms",),
    "mlp.kind": ("gated",),
    "mlp.activation": ("silu",),
}
"""Properties of a layer, and the values of each that the kernels support."""

UNIFORM = ("attention.num_heads", "mlp.intermediate_size", "norm.eps")
"""Properties that must be the same in all layers: the kernels keep one value of each for the whole model."""


def why_not_native(config: ModelSpec) -> str | None:
    """Why the native kernels cannot compute a model, in words; None if they can."""
    reason = unsupported_property(config, SUPPORTED)
    for path in UNIFORM:
        reason = reason or differing_layers(config, path)
    if reason is not None:
        return reason
    layer = config.layers[0]
    if config.norm.eps != layer.norm.eps:
        return f"norm.eps of the layers ({layer.norm.eps}) and of the final norm ({config.norm.eps}) differ"
    group = layer.attention.num_heads // layer.attention.num_kv_heads
    if config.head_dim > MAX_HEAD_DIM:
        return f"attention.head_dim is {config.head_dim}, the kernels support at most {MAX_HEAD_DIM}"
    if group > MAX_GROUP_SIZE:
        return (
            f"{group} query heads (attention.num_heads) share a KV head, the limit of the kernels is {MAX_GROUP_SIZE}"
        )
    return None


class NativeModel:
    """Packed weights and the compiled forward pass.

    Args:
        config: of the model.
        weights: source of the tensors, which are read one at a time, so that there is never a second full copy.
        library: the kernels.
        int8: whether weights are int8 with a scale per output channel, otherwise bfloat16.
        max_model_len: positions that the rotary tables cover.
        threads: number of threads that pack the weights.
        on_progress: called with a number from 0 to 1 while weights are read.

    Raises:
        UnsupportedModelError: the kernels do not support a layer; the message names the property.
        ModelLoadError: a weight is missing or has another shape.
    """

    def __init__(
        self,
        config: ModelSpec,
        weights: WeightSource,
        *,
        library: Library,
        int8: bool,
        max_model_len: int,
        threads: int = 1,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        reason = why_not_native(config)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.config = config
        self.library = library
        self.int8 = int8
        self._threads = threads
        self._weights = weights
        self._arena = Arena(self._num_bytes())
        self._kept: list[FloatArray] = []  # arrays outside the arena that the structures point to
        c = config
        # The biggest tensor first, while nothing else takes memory.
        if c.tie_word_embeddings:
            embedding = None
            head = self._matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        else:
            embedding = self._embedding()
            head = self._matrix("lm_head.weight", c.vocab_size, c.hidden_size)
        tables = self._rotary_tables(max_model_len)
        layers = (LayerStruct * c.num_hidden_layers)()
        for i, layer in enumerate(c.layers):
            self._load_layer(layers[i], i, layer)
            layers[i].cosines, layers[i].sines = tables[layer.attention.rope]
            on_progress((i + 1) / c.num_hidden_layers)
        first = c.layers[0]
        self._struct = ModelStruct(
            c.hidden_size, first.mlp.intermediate_size, c.num_hidden_layers, first.attention.num_heads,
            c.num_key_value_heads, c.head_dim, c.vocab_size, int8, first.norm.eps, embedding, layers,
            self._vector("model.norm.weight", c.hidden_size), head,
        )  # fmt: skip
        del self._weights

    def engine(self, kv: Structure) -> "NativeEngine":
        """The forward pass over a KV cache."""
        return NativeEngine(self, self._struct, kv)

    def _num_bytes(self) -> int:
        c, first = self.config, self.config.layers[0]
        q_size, kv_size, inter = first.attention.q_size, first.attention.kv_size, first.mlp.intermediate_size
        of_layer = [
            (q_size + 2 * kv_size, c.hidden_size), (c.hidden_size, q_size),
            (2 * round_up(inter, GROUP), c.hidden_size), (c.hidden_size, inter),
        ]  # fmt: skip
        size = self.library.weight_bytes
        total = c.num_hidden_layers * sum(size(n, k, int8=self.int8) for n, k in of_layer)
        total += size(c.vocab_size, c.hidden_size, int8=self.int8)
        if not c.tie_word_embeddings:
            total += round_up(c.vocab_size * c.hidden_size * 2, ALIGNMENT)
        return total

    def _rotary_tables(self, max_model_len: int) -> dict[RopeConfig | None, tuple[int | None, int | None]]:
        """Addresses of the cosines and sines of each kind of rotation, [max_model_len, head_dim / 2] each."""
        half = self.config.head_dim // 2
        found = {}
        for rope in {layer.attention.rope for layer in self.config.layers}:
            if rope is None:  # no rotation: every number is multiplied by 1 and keeps its bits
                tables = torch.ones(max_model_len, half), torch.zeros(max_model_len, half)
            else:
                cosines, sines = rotary_tables(rope, self.config.head_dim, max_model_len, torch.float32)
                tables = cosines[:, :half].contiguous(), sines[:, :half].contiguous()
            found[rope] = self._keep(tables[0].numpy()), self._keep(tables[1].numpy())
        return found

    def _load_layer(self, layer: Structure, i: int, spec: LayerSpec) -> None:
        hidden_size, attention = self.config.hidden_size, spec.attention
        name = f"model.layers.{i}"
        layer.input_norm = self._vector(f"{name}.input_layernorm.weight", hidden_size)
        layer.qkv = self._linear(
            {
                f"{name}.self_attn.q_proj": attention.q_size,
                f"{name}.self_attn.k_proj": attention.kv_size,
                f"{name}.self_attn.v_proj": attention.kv_size,
            },
            hidden_size,
            attention.qkv_bias,
        )
        if attention.qk_norm:
            layer.q_norm = self._vector(f"{name}.self_attn.q_norm.weight", attention.head_dim)
            layer.k_norm = self._vector(f"{name}.self_attn.k_norm.weight", attention.head_dim)
        layer.o = self._linear({f"{name}.self_attn.o_proj": hidden_size}, attention.q_size, attention.o_bias)
        layer.post_norm = self._vector(f"{name}.post_attention_layernorm.weight", hidden_size)
        layer.gate_up = self._gate_up(f"{name}.mlp", spec.mlp)
        layer.down = self._linear({f"{name}.mlp.down_proj": hidden_size}, spec.mlp.intermediate_size, spec.mlp.bias)

    def _linear(self, parts: dict[str, int], in_size: int, has_bias: bool) -> Structure:
        """One projection out of several that read the same input: name → output size."""
        weight = torch.cat([self._get(f"{name}.weight", out, in_size) for name, out in parts.items()])
        bias = None
        if has_bias:
            bias = torch.cat([self._get(f"{name}.bias", out) for name, out in parts.items()])
        return self._pack(weight, bias)

    def _gate_up(self, name: str, spec: MLPSpec) -> Structure:
        inter = spec.intermediate_size
        gates = round_up(inter, GROUP)

        def interleave(kind: str, *in_size: int) -> torch.Tensor:
            parts = []
            for part in ("gate_proj", "up_proj"):
                padded = torch.zeros(gates, *in_size)
                padded[:inter] = self._get(f"{name}.{part}.{kind}", inter, *in_size)
                parts.append(padded.view(-1, 1, GATES, *in_size))
            return torch.cat(parts, dim=1).reshape(2 * gates, *in_size)

        bias = interleave("bias") if spec.bias else None
        return self._pack(interleave("weight", self.config.hidden_size), bias)

    def _matrix(self, name: str, rows: int, columns: int) -> Structure:
        return self._pack(self._get(name, rows, columns), None)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Structure:
        n, k = round_up(weight.shape[0], PANEL), round_up(weight.shape[1], GROUP)
        data = self._arena.take(n * k * (1 if self.int8 else 2))
        scales = self._arena.take(n * 4).view(np.float32) if self.int8 else None
        self.library.pack(weight.contiguous().numpy(), data, scales, self._threads)
        bias_at = None if bias is None else self._padded(bias, n)
        return WeightsStruct(pointer(data), pointer(scales), bias_at, n, k)

    def _embedding(self) -> int | None:
        c = self.config
        data = self._arena.take(c.vocab_size * c.hidden_size * 2)
        table = torch.from_numpy(data).view(torch.bfloat16).view(c.vocab_size, c.hidden_size)
        table.copy_(self._weights.get("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), torch.bfloat16))
        return pointer(data)

    def _vector(self, name: str, size: int) -> int | None:
        return self._padded(self._get(name, size), round_up(size, GROUP))

    def _padded(self, vector: torch.Tensor, size: int) -> int | None:
        padded = np.zeros(size, dtype=np.float32)
        padded[: len(vector)] = vector.numpy()
        return self._keep(padded)

    def _keep(self, array: FloatArray) -> int | None:
        self._kept.append(array)
        return pointer(array)

    def _get(self, name: str, *shape: int) -> torch.Tensor:
        return self._weights.get(name, shape, torch.float32)


class NativeEngine:
    """The forward pass of a model over a KV cache, with the buffers that its steps need.

    Args:
        model: kept alive by the engine.
        struct: the model's structure.
        kv: the cache's structure; the caller owns its memory.
    """

    def __init__(self, model: NativeModel, struct: Structure, kv: Structure) -> None:
        self._model = model
        self._dll = model.library.dll
        self._engine: int | None = self._dll.treadle_create(byref(struct), byref(kv))

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        rows: IntArray,
        tables: IntArray,
        run_start: IntArray,
        run_count: IntArray,
        threads: int,
    ) -> None:
        """Compute a step's tokens: write their KV, and keep their hidden states for `logits`.

        Args:
            token_ids, positions, rows: int32 [T], of each token: id, place in its sequence, row of `tables`.
            tables: int32 [rows, blocks], C-contiguous.
            run_start, run_count: int32 [runs]; each run is consecutive tokens of one sequence.
            threads: number of threads.
        """
        step = StepStruct(
            pointer(token_ids), pointer(positions), pointer(rows), pointer(tables), pointer(run_start),
            pointer(run_count), tables.shape[1], len(token_ids), len(run_start), threads,
        )  # fmt: skip
        self._dll.treadle_forward(self._engine, byref(step))

    def logits(
        self, tokens: IntArray, place: IntArray, out: npt.NDArray[np.float32] | None, threads: int
    ) -> IntArray:
        """The most likely next token after each of some tokens of the last step: int32 [n].

        Args:
            tokens: int32 [n], indices among the step's tokens.
            place: int32 [n], row of `out` for the token's logits, or -1.
            out: float32 [.., vocab], filled at those places; None if all places are -1.
            threads: number of threads.
        """
        best = np.empty(len(tokens), dtype=np.int32)
        self._dll.treadle_logits(
            self._engine, pointer(tokens), len(tokens), pointer(place), pointer(out), pointer(best), threads
        )
        return best

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self._dll.treadle_destroy(self._engine)
            self._engine = None
