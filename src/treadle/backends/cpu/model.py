"""The forward pass on the native CPU kernels: weights packed for them in one of several formats.

It interprets a ModelSpec and knows no architecture. The computation itself is in backends/cpu/csrc/step.h;
backends/torch/model.py is its counterpart in plain torch.
"""

from collections import Counter
from collections.abc import Callable
from ctypes import Structure, byref

import numpy as np
import numpy.typing as npt
import torch

from treadle.backends.cpu.arena import Arena, round_up
from treadle.backends.cpu.library import (
    BLOCK_GROUP,
    FORMATS,
    GROUP,
    MAX_GROUP_SIZE,
    MAX_HEAD_DIM,
    NARROWINGS,
    PANEL,
    Array,
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
    ModelSpec,
    RopeConfig,
    differing_layers,
    unsupported_property,
    weight_shapes,
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


WEIGHT_FORMATS = ("bfloat16", "int8", "int4", "stored")
"""What weights are packed as: bfloat16; int8 with a scale per output channel; 4 bits with a scale and a minimum per
group of 32 (GGUF's Q4_1; embedding and output projection in 8 bits, Q8_0); as the GGUF file stores them."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class NativeModel:
    """Packed weights and the compiled forward pass.

    Args:
        config: of the model.
        weights: source of the tensors, which are read one at a time, so that there is never a second full copy.
        library: the kernels.
        weight_format: one of WEIGHT_FORMATS. With "stored", a matrix that the file stores as floats becomes Q8_0.
        max_model_len: positions that the rotary tables cover.
        threads: number of threads that pack the weights.
        on_progress: called with a number from 0 to 1 while weights are read.

    Attributes:
        config, library, weight_format: as given.
        formats: those of the matrices, the most frequent first; each one of FORMATS.

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
        weight_format: str,
        max_model_len: int,
        threads: int = 1,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        reason = why_not_native(config)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.config = config
        self.library = library
        self.weight_format = weight_format
        self._threads = threads
        self._weights = weights
        matrices = [(self._format(name), shape) for name, shape in weight_shapes(config) if len(shape) == 2]
        self.formats = [form for form, _ in Counter(form for form, _ in matrices).most_common()]
        self._arena = Arena(sum(library.matrix_bytes(form, *shape) for form, shape in matrices))
        self._kept: list[FloatArray] = []  # arrays outside the arena that the structures point to
        c = config
        # The biggest tensor first, while nothing else takes memory.
        embedding = self._matrix(_EMBEDDING, c.vocab_size, c.hidden_size)
        head = embedding if c.tie_word_embeddings else self._matrix(_HEAD, c.vocab_size, c.hidden_size)
        tables = self._rotary_tables(max_model_len)
        layers = (LayerStruct * c.num_hidden_layers)()
        for i, layer in enumerate(c.layers):
            self._load_layer(layers[i], i, layer)
            layers[i].cosines, layers[i].sines = tables[layer.attention.rope]
            on_progress((i + 1) / c.num_hidden_layers)
        first = c.layers[0]
        narrowing = NARROWINGS.index(weight_format if weight_format in NARROWINGS else "blocks")
        self._struct = ModelStruct(
            c.hidden_size, first.mlp.intermediate_size, c.num_hidden_layers, first.attention.num_heads,
            c.num_key_value_heads, c.head_dim, c.vocab_size, narrowing, first.norm.eps, embedding, layers,
            self._vector("model.norm.weight", c.hidden_size), head,
        )  # fmt: skip
        del self._weights

    def describe_weights(self) -> str:
        """The formats of the weights in words."""
        if self.weight_format == "stored":
            return f"{' and '.join(self.formats)} as stored"
        return self.weight_format

    def engine(self, kv: Structure) -> "NativeEngine":
        """The forward pass over a KV cache."""
        return NativeEngine(self, self._struct, kv)

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
        layer.q = self._matrix(f"{name}.self_attn.q_proj.weight", attention.q_size, hidden_size, attention.qkv_bias)
        layer.k = self._matrix(f"{name}.self_attn.k_proj.weight", attention.kv_size, hidden_size, attention.qkv_bias)
        layer.v = self._matrix(f"{name}.self_attn.v_proj.weight", attention.kv_size, hidden_size, attention.qkv_bias)
        if attention.qk_norm:
            layer.q_norm = self._vector(f"{name}.self_attn.q_norm.weight", attention.head_dim)
            layer.k_norm = self._vector(f"{name}.self_attn.k_norm.weight", attention.head_dim)
        layer.o = self._matrix(f"{name}.self_attn.o_proj.weight", hidden_size, attention.q_size, attention.o_bias)
        layer.post_norm = self._vector(f"{name}.post_attention_layernorm.weight", hidden_size)
        inter, has_bias = spec.mlp.intermediate_size, spec.mlp.bias
        layer.gate = self._matrix(f"{name}.mlp.gate_proj.weight", inter, hidden_size, has_bias)
        layer.up = self._matrix(f"{name}.mlp.up_proj.weight", inter, hidden_size, has_bias)
        layer.down = self._matrix(f"{name}.mlp.down_proj.weight", hidden_size, inter, has_bias)

    def _matrix(self, name: str, rows: int, columns: int, has_bias: bool = False) -> Structure:
        form = self._format(name)
        n, k = round_up(rows, PANEL), round_up(columns, GROUP)
        data = self._arena.take(self.library.matrix_bytes(form, rows, columns))
        source = self._source(name, form, rows, columns)
        num_bad = self.library.pack(form, source, rows, columns, data, self._threads)
        if num_bad:
            problem = f"has {num_bad} groups of weights whose scale is NaN or infinite; the file is damaged"
            raise self._weights.damaged(name, problem)
        bias = self._padded(self._get(name.removesuffix("weight") + "bias", rows), n) if has_bias else None
        return WeightsStruct(pointer(data), bias, n, k, FORMATS.index(form))

    def _format(self, name: str) -> str:
        """Which of FORMATS a matrix is packed in."""
        if self.weight_format == "stored":
            return self._weights.block_format(name) or "Q8_0"
        if self.weight_format == "int4":
            return "Q8_0" if name in (_EMBEDDING, _HEAD) else "Q4_1"
        # A table that is only looked up is not worth rounding to int8.
        is_looked_up = name == _EMBEDDING and not self.config.tie_word_embeddings
        return "INT8" if self.weight_format == "int8" and not is_looked_up else "BF16"

    def _source(self, name: str, form: str, rows: int, columns: int) -> Array:
        if self.weight_format == "stored" and self._weights.block_format(name) is not None:
            return self._weights.blocks(name, (rows, columns)).contiguous().numpy()
        values = self._get(name, rows, columns).contiguous().numpy()
        if form in ("BF16", "INT8"):
            return values
        from gguf import GGMLQuantizationType, quants

        padded = np.pad(values, ((0, 0), (0, -columns % BLOCK_GROUP)))
        blocks: Array = quants.quantize(padded, GGMLQuantizationType[form])
        return blocks

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
