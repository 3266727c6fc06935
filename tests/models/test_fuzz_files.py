"""Model files with random changes: each is loaded and computes, or is refused with its name and what is wrong."""

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given

from support import load_model
from support.examples import examples
from support.model_files import (
    ARRAY,
    BOOL,
    FLOAT32,
    STRING,
    TOKENS,
    UINT32,
    gguf_bytes,
    gguf_fields,
    gguf_tensors,
    huggingface_files,
    weights,
    write_folder,
)

MAX_SECONDS = 2.0
"""CPU time that a file of a few KB may take."""
MAX_BYTES = 300 * 2**20
SETTINGS_OF_MODELS = ("model:", "max_model_len:", "layer 0: mlp.activation")
"""How an error begins that names no file: a setting, or what a backend lacks."""


class Child:
    """A process that loads one model after the other."""

    def __init__(self):
        self.process = None

    def load(self, path, kernels):
        """What becomes of a model; the process is replaced if it dies of it."""
        if self.process is None:
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
            self.process = subprocess.Popen(
                [sys.executable, load_model.__file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "TREADLE_LOG_LEVEL": "CRITICAL"},
            )  # fmt: skip
        self.process.stdin.write(json.dumps([str(path), kernels]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            errors = self.errors.read()[-2000:].decode()
            raise AssertionError(f"the process that loaded {path} died with status {self.end()}: {errors}")
        return json.loads(line)

    def end(self):
        """End the process; returns its exit status."""
        process, self.process = self.process, None
        process.stdin.close()
        status = process.wait(60)
        process.stdout.close()
        self.errors.close()
        return status


@pytest.fixture(scope="module")
def child():
    child = Child()
    yield child
    if child.process is not None:
        child.end()


def check(child, path, kernels):
    answer = child.load(path, kernels)
    assert "raised" not in answer, answer["raised"]
    assert answer["seconds"] < MAX_SECONDS
    assert answer["bytes"] < MAX_BYTES
    if "refused" in answer:
        assert str(path) in answer["refused"] or answer["refused"].startswith(SETTINGS_OF_MODELS)
    elif answer["error"] is None:
        assert 1 <= answer["num_tokens"] <= 2  # one if the model's length is 2


# Bytes

small = st.integers(0, 2**16)
raw_edits = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), small, st.integers(0, 7)),
        st.tuples(st.just("cut"), small),
        st.tuples(st.just("insert"), small, st.binary(min_size=1, max_size=20)),
        st.tuples(st.just("remove"), small, st.integers(1, 20)),
        st.tuples(st.just("set"), small, st.sampled_from([b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f", b"\x00" * 4 + b"\x01\0\0\0"])),
    ),
    min_size=1, max_size=3,
)  # fmt: skip


def edit_bytes(data, edits):
    """`data` after some edits; places count from the start, over and over."""
    data = bytearray(data)
    for kind, place, *what in edits:
        place %= len(data) + 1
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << what[0]
        elif kind == "cut":
            del data[place:]
        elif kind == "insert":
            data[place:place] = what[0]
        elif kind == "remove":
            del data[place : place + what[0]]
        elif kind == "set":
            data[place : place + len(what[0])] = what[0]
    return bytes(data)


# Values

nested = st.sampled_from([2, 20, 100]).map(lambda depth: json.loads("[" * depth + "]" * depth))
junk = st.one_of(
    st.sampled_from([
        None, True, False, 0, 1, 2, 3, -1, 7, 16, 17, 2**15, 2**24, 2**31 - 1, 2**31, 2**32, 2**63, 10**400, 0.0, -0.0,
        0.5, -1.5, 1e-30, 1e30, 1e308, math.nan, math.inf, -math.inf, "", "a", "</s>", "\ud800", "\x00", "\u2028", "none",
        "llama3", "linear", [], [0], [None], [[]], ["a", "a"], {}, {"a": None}, {"type": "linear"}, {"content": 3},
    ]),
    st.integers(), st.floats(), st.text(max_size=8), nested,
).map(copy.deepcopy)  # fmt: skip


def paths_of(value, path=()):
    """Where the parts of a JSON value lie."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from paths_of(part, (*path, key))


@st.composite
def json_edits(draw, value):
    """The JSON value after one to three edits: something else in a place, a key or an entry gone, twice or new."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        paths = list(paths_of(value))
        if not paths:
            break
        *parents, last = draw(st.sampled_from(paths))
        owner = value
        for key in parents:
            owner = owner[key]
        kind = draw(st.sampled_from(["set", "set", "set", "drop", "copy", "add"]))
        if kind == "drop":
            del owner[last]
        elif kind == "set":
            owner[last] = draw(junk)
        elif isinstance(owner, list):
            owner.insert(last, owner[last] if kind == "copy" else draw(junk))
        else:
            other = draw(st.sampled_from(sorted(owner))) if kind == "copy" else draw(st.text(max_size=8))
            owner[other] = owner[last]
    return value


HF = huggingface_files()
HF["config.json"] |= {
    "head_dim": 4, "sliding_window": None, "attention_bias": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip
LAYER = "model.layers.0.self_attn."
HF["model.safetensors"] = safetensors.numpy.save(
    dict(weights().values())
    | {f"{LAYER}{part}_proj.bias": np.full(size, 0.1, np.float32) for part, size in (("q", 8), ("k", 4), ("v", 4))}
    | {f"{LAYER}{part}_norm.weight": np.ones(4, np.float32) for part in "qk"}
)
ARCHITECTURES = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
]
PIECES = {
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {"type": "NFC"}]},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<unk>",
    },
}  # fmt: skip
TOKENIZERS = [
    HF["tokenizer.json"],
    HF["tokenizer.json"] | PIECES | {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [[token, -i / 2] for i, token in enumerate(TOKENS)], "byte_fallback": False},
    },
    HF["tokenizer.json"] | PIECES | {
        "model": HF["tokenizer.json"]["model"] | {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "merges": []},
    },
    HF["tokenizer.json"] | {"model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(TOKENS)}, "unk_token": "<unk>"}},
]  # fmt: skip
HF["generation_config.json"] |= {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
JSON_FILES = sorted(name for name in HF if name.endswith(".json"))


@st.composite
def edited_folder(draw):
    """The files of a folder, one of them edited."""
    architecture = draw(st.sampled_from(ARCHITECTURES))
    files = HF | {
        "config.json": HF["config.json"] | {"architectures": [architecture]},
        "tokenizer.json": draw(st.sampled_from(TOKENIZERS)),
    }
    name = draw(st.sampled_from([*JSON_FILES, *JSON_FILES, *HF]))
    if name == "model.safetensors":
        data = files[name]
        length = int.from_bytes(data[:8], "little")
        if draw(st.booleans()):
            header = json.dumps(draw(json_edits(json.loads(data[8 : 8 + length])))).encode()
            data = len(header).to_bytes(8, "little") + header + data[8 + length :]
        else:
            data = edit_bytes(data, draw(raw_edits))
        files[name] = data
    elif draw(st.integers(0, 5)):
        files[name] = draw(json_edits(files[name]))
    else:
        files[name] = edit_bytes(json.dumps(files[name]).encode(), draw(raw_edits))
    return files


KINDS = (UINT32, FLOAT32, BOOL, STRING)
NUMBERS = {UINT32: st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2, 3, 16, 2**31, 2**32 - 1]),
           FLOAT32: st.floats(width=32), BOOL: st.booleans(), STRING: st.text(max_size=8)}  # fmt: skip


def gguf_value(kind):
    return st.tuples(st.just(kind), NUMBERS[kind].filter(lambda value: kind != STRING or "\ud800" not in value))


gguf_junk = st.one_of(
    st.sampled_from(KINDS).flatmap(gguf_value),
    st.sampled_from(KINDS).flatmap(
        lambda kind: st.tuples(st.just((ARRAY, kind)), st.lists(NUMBERS[kind], max_size=20))
    ),
)


@st.composite
def edited_gguf(draw):
    """A GGUF file, edited in its fields, its table of tensors, or its bytes."""
    fields, tensors = gguf_fields(), gguf_tensors()
    if draw(st.booleans()):
        fields |= {
            "tokenizer.ggml.model": (STRING, "llama"),
            "tokenizer.ggml.scores": ((ARRAY, FLOAT32), [0.0] * len(fields["tokenizer.ggml.tokens"][1])),
        }
    for _ in range(draw(st.integers(0, 2))):
        numbers = [key for key, (kind, _) in fields.items() if kind in (UINT32, FLOAT32)]
        key = draw(st.sampled_from(numbers))
        factor = draw(st.sampled_from([0, 0.5, 2, 3, 16, 1e4]))
        kind, value = fields[key]
        fields[key] = (kind, int(value * factor) % 2**32 if kind == UINT32 else value * factor)
    for _ in range(draw(st.integers(0, 1))):
        key = draw(st.sampled_from(["tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"]))
        kind, values = fields[key]
        values = list(values)
        value = (
            draw(st.sampled_from(["a b", "ab", "", "\u2581a", "<0x41>", "c"])) if kind[1] == STRING else draw(small)
        )
        place = draw(st.integers(0, len(values)))
        values[place : place + draw(st.integers(0, 1))] = [value]
        fields[key] = (kind, values)
    for _ in range(draw(st.integers(0, 1))):
        key = draw(
            st.sampled_from([*fields, "llama.rope.scaling.type", "llama.attention.key_length", "llama.vocab_size"])
        )
        if draw(st.integers(0, 4)):
            fields[key] = draw(gguf_junk)
        else:
            fields.pop(key, None)
    for _ in range(draw(st.integers(0, 3)) // 3):
        i = draw(st.integers(0, len(tensors) - 1))
        name, shape, kind, offset, raw = tensors[i]
        part = draw(st.sampled_from(["name", "shape", "kind", "offset", "gone"]))
        if part == "gone":
            del tensors[i]
            continue
        if part == "name":
            name = draw(st.sampled_from([tensor[0] for tensor in tensors] + ["", "rope_freqs.weight"]))
        elif part == "shape":
            shape = tuple(draw(st.lists(st.integers(0, 40) | st.sampled_from([2**31, 2**63, 2**64 - 1]), max_size=5)))
        elif part == "kind":
            kind = draw(st.integers(0, 50))
        else:
            offset = draw(st.integers(0, 2**64 - 1) | st.integers(0, 2**12).map(lambda n: n * 32))
        tensors[i] = (name, shape, kind, offset, raw)
    data = gguf_bytes(fields, tensors)
    return edit_bytes(data, draw(raw_edits)) if draw(st.integers(0, 4)) == 0 else data


kernels = st.sampled_from(["auto", "off"])
SETTINGS = examples(800, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@SETTINGS
@given(data=edited_gguf(), kernels=kernels)
def test_gguf(data, kernels, child, tmp_path_factory):
    path = Path(tmp_path_factory.getbasetemp()) / "fuzz.gguf"
    path.write_bytes(data)
    check(child, path, kernels)


@SETTINGS
@given(files=edited_folder(), kernels=kernels)
def test_huggingface(files, kernels, child, tmp_path_factory):
    folder = Path(tmp_path_factory.getbasetemp()) / "fuzz"
    write_folder(folder, files)
    check(child, folder, kernels)


def test_millions_of_positions_in_a_small_pool(child, tmp_path):
    """What is computed for each position of the model would be half a gigabyte."""
    config = HF["config.json"] | {"max_position_embeddings": 12_000_000}
    for kernels in ("auto", "off"):
        check(child, write_folder(tmp_path / "model", HF | {"config.json": config}), kernels)
