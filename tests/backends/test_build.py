"""Compiling and caching the kernels, and the errors and fallbacks when this fails."""

import builtins
import ctypes
import io
import logging
import os
import shutil
import subprocess
import sys
from ctypes import byref

import numpy as np
import pytest

from support.native import RUNNABLE, SANITIZED, native_library
from treadle import LLM, SamplingParams
from treadle.assembly.engine_config import CPU_KERNELS
from treadle.backends.cpu import BUILDS, KernelBuildError, build, library
from treadle.backends.cpu.build import best_build, library_path, missing_features
from treadle.backends.cpu.library import (
    ABI,
    FORMATS,
    GROUP,
    KVCacheStruct,
    Library,
    ModelStruct,
    StepStruct,
    WeightsStruct,
)
from treadle.backends.torch.model import INT8_GROUP
from treadle.core.errors import ConfigError

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="this processor has no native kernels")

FAST = ("-O0",)  # the compiled kernels are not run in these tests
SMALL = {"num_kv_blocks": 64, "max_model_len": 256, "log_stats_interval_s": 0}
SOURCE = 'extern "C" int answer() { return 42; }\n'  # compiled in place of the kernels, which take seconds


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(folder))
    library.load_library.cache_clear()
    yield folder
    library.load_library.cache_clear()


@pytest.fixture
def small(tmp_path):
    """A source file that compiles quickly."""
    path = tmp_path / "small.cpp"
    path.write_text(SOURCE)
    return path


def script(folder, commands):
    """Return the path of a compiler that is a shell script with `commands`."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return str(path)


def test_the_builds_are_those_of_the_setting():
    assert ("auto", *BUILDS, "off") == CPU_KERNELS


def test_the_kernels_are_compiled_once_and_again_when_stale(cache, small, monkeypatch, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "treadle"):
        first = library_path("avx2", source=small)
        assert library_path("avx2", source=small) == first
    notices = [record.message for record in caplog.records]
    assert len(notices) == 1
    assert "compiling the CPU kernels (avx2)" in notices[0]
    # A change of source, headers or processor leads to a different file.
    small.write_text(SOURCE + "// changed\n")
    second = library_path("avx2", source=small)
    changed = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, changed)
    with (changed / "simd" / "avx2.h").open("a") as header:
        header.write("\n// changed\n")
    monkeypatch.setattr(build, "SOURCES", changed)
    third = library_path("avx2", source=small)
    monkeypatch.setattr(build, "_cpu_info", lambda field: "another")
    fourth = library_path("avx2", source=small)
    assert set(cache.glob("*.so")) == {first, second, third, fourth}
    assert len({first, second, third, fourth}) == 4
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_mirrored_constants_are_compared_with_the_compiled_library(monkeypatch):
    path = native_library().dll._name
    Library(path, best_build())
    for name in ("PANEL", "sizeof Model"):
        changed = {**ABI, name: ABI[name] + 8}
        monkeypatch.setattr(library, "ABI", changed)
        with pytest.raises(
            KernelBuildError, match=rf"{path} .*: {name} is {ABI[name]} in it and {changed[name]} in Python; delete"
        ):
            Library(path, best_build())
    monkeypatch.setattr(library, "ABI", {name: value for name, value in ABI.items() if name != "sizeof Step"})
    with pytest.raises(KernelBuildError, match=rf"sizeof Step is {ABI['sizeof Step']} in it and None in Python"):
        Library(path, best_build())


def test_a_library_without_a_function_is_refused(cache, tmp_path):
    source = tmp_path / "treadle.c"
    source.write_text("int treadle_abi(void) { return 0; }")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "old.so")], check=True)
    with pytest.raises(
        KernelBuildError, match=r"old.so does not fit .*no function treadle_matrix_bytes; delete the file"
    ):
        Library(str(tmp_path / "old.so"), "avx2")


def test_constants_equal_those_of_the_torch_reference():
    assert INT8_GROUP == GROUP


@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer ends the process instead")
def test_a_step_that_runs_out_of_memory_fails_and_the_next_one_runs():
    dll = native_library().dll
    # Without layers, a step only copies rows of the embedding, each of 2²⁴ numbers; here always the first row.
    hidden = 2**24
    embedding, ids = np.zeros(32 * hidden, dtype=np.uint16), np.zeros(2**24, dtype=np.int32)
    sizes = {"hidden": hidden, "intermediate": 64, "heads": 1, "kv_heads": 1, "head_dim": 64, "vocab": 1}
    model = ModelStruct(
        **sizes, embedding=WeightsStruct(embedding.ctypes.data, None, 32, hidden, FORMATS.index("BF16"))
    )
    engine = dll.treadle_create(byref(model), byref(KVCacheStruct(kv_heads=1, dim=64, block_size=16)))
    try:
        step = StepStruct(token_ids=ids.ctypes.data, positions=ids.ctypes.data, tokens=2**24, threads=1)
        with pytest.raises(MemoryError, match=r"no memory for a step \(treadle_forward\)"):
            dll.treadle_forward(engine, byref(step))
        step.tokens = 1
        dll.treadle_forward(engine, byref(step))
    finally:
        dll.treadle_destroy(engine)


def test_only_one_of_several_starting_processes_compiles(cache, small, tmp_path):
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo >> {tmp_path}/compiled; sleep 0.3; }}\ng++ "$@"\n'
    )
    compiler.chmod(0o755)
    code = f"from pathlib import Path\nfrom treadle.backends.cpu.build import library_path\nlibrary_path('avx2', source=Path({str(small)!r}))"
    environment = {**os.environ, "CXX": str(compiler)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert all(process.wait(timeout=120) == 0 for process in started)
    assert (tmp_path / "compiled").read_text() == "\n"
    assert len(list(cache.glob("*.so"))) == 1


def test_compiler_errors_are_logged_and_torch_is_used_instead(cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", script(tmp_path, "echo 'error: this machine has no vowels' >&2; exit 3"))
    with pytest.raises(KernelBuildError, match=r"(?s)failed with status 3.*has no vowels"):
        library_path("avx2")
    with caplog.at_level(logging.WARNING, "treadle"):
        llm = LLM(dtype="bfloat16", **SMALL)
    assert "computing with plain torch" in caplog.text
    assert "has no vowels" in caplog.text
    (output,) = llm.generate("1, 2, 3, 4,", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(ConfigError, match="cpu_kernels"):
        LLM(cpu_kernels=best_build(), **SMALL)


def test_errors_for_a_missing_compiler(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler-7")
    with pytest.raises(KernelBuildError, match=r"CXX=no-such-compiler-7: there is no such program"):
        library_path("avx2")
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(KernelBuildError, match="not a command line"):
        library_path("avx2")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler was found"):
        library_path("avx2")


def test_a_damaged_library_is_compiled_again(cache, caplog, small):
    path = library_path("avx2", FAST, small)
    whole = path.read_bytes()
    middle = len(whole) // 2
    other = cache / "other.so"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(other)], check=True)
    damaged = (
        whole[:middle],
        whole[:middle] + bytes(4096) + whole[middle + 4096 :],
        bytes(5),
        b"",
        other.read_bytes(),
    )
    for content in damaged:
        caplog.clear()
        path.write_bytes(content)
        with caplog.at_level(logging.INFO, "treadle"):
            assert library_path("avx2", FAST, small) == path
        (line,) = [record.message for record in caplog.records]
        assert line == f"{path} is damaged; compiling the CPU kernels (avx2) again"
    assert ctypes.CDLL(str(path)).answer() == 42


def test_compilation_is_repeated_after_a_compiler_leaves_a_broken_file(cache, tmp_path, monkeypatch, small):
    calls = tmp_path / "calls"
    for action in ("exit 0", 'printf broken > "$last"', 'head -c 20000 /bin/sh > "$last"'):
        calls.write_text("")
        work = f'for last; do :; done; echo "$last" >> {calls}; {action}'
        monkeypatch.setenv("CXX", script(tmp_path, f'[ "$1" = --version ] && exit; {work}'))
        for _ in range(2):
            with pytest.raises(KernelBuildError, match=r"left (no file|a file that cannot be loaded).*CXX"):
                library_path("avx2", FAST, small)
        assert len(calls.read_text().splitlines()) == 2
        assert not list(cache.glob("*.so"))


def test_a_compiler_that_hangs_is_killed_with_its_child_processes(cache, tmp_path, monkeypatch, small):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(build, "_VERSION_TIMEOUT_S", 0.5)
    monkeypatch.setenv("CXX", script(tmp_path, f"exec 9> {fifo}; sleep 100; echo survived >&9"))
    with pytest.raises(KernelBuildError, match=r"--version took more than 0.5 s; install g\+\+, or name another"):
        library_path("avx2", FAST, small)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # the last process with a writable end of the pipe has ended
    os.close(reader)


def test_compiler_output_may_contain_any_bytes(cache, tmp_path, monkeypatch, small):
    monkeypatch.setenv("CXX", script(tmp_path, "printf '\\377no\\376' >&2; printf '\\377'; [ $# = 1 ]"))
    with pytest.raises(KernelBuildError, match="failed with status 1.*\n\ufffdno\ufffd"):
        library_path("avx2", FAST, small)


def test_a_compiled_library_is_used_without_a_compiler(cache, monkeypatch, caplog, small):
    path = library_path("avx2", FAST, small)
    monkeypatch.setenv("PATH", "/nonexistent")
    with caplog.at_level(logging.INFO, "treadle"):
        assert library_path("avx2", FAST, small) == path
    assert "no C++ compiler was found" in caplog.text
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        library_path("avx2", ("-O1",), small)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        library_path("avx2", FAST, small)


def test_an_unwritable_cache_is_reported(cache, tmp_path, monkeypatch, caplog, small):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "file"))
    path = library_path("avx2", FAST, small)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert "set TREADLE_CACHE_DIR to a folder that can be written" in caplog.text
    monkeypatch.setattr(build.tempfile, "mkdtemp", refuse)
    with pytest.raises(KernelBuildError, match=r"cannot be written \(.*set TREADLE_CACHE_DIR"):
        library_path("avx2", FAST, small)


def refuse(*args, **options):
    raise OSError(28, "No space left on device")


def test_a_read_only_cache_is_used(cache, monkeypatch, caplog, small):
    path = library_path("avx2", FAST, small)
    monkeypatch.setattr(build.fcntl, "flock", refuse)  # root can write to any folder, whatever its mode
    assert library_path("avx2", FAST, small) == path
    assert not caplog.records


def test_a_user_without_a_home_has_to_set_the_cache_folder(monkeypatch, small):
    for name in ("HOME", "XDG_CACHE_HOME", "TREADLE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(KernelBuildError, match="home directory.*set TREADLE_CACHE_DIR"):
        library_path("avx2", FAST, small)


def test_a_library_that_cannot_be_loaded_is_a_typed_error(tmp_path):
    (tmp_path / "broken.so").write_text("no library")
    with pytest.raises(KernelBuildError, match=r"broken.so cannot be loaded \(.*TREADLE_CACHE_DIR"):
        Library(str(tmp_path / "broken.so"), "avx2")


def test_builds_are_limited_to_those_the_processor_supports(monkeypatch, caplog):
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2", "f16c", "fma", "sse2"}))
    assert best_build() == "avx2"
    assert missing_features("avx512")
    with pytest.raises(ConfigError, match=r"avx512 needs what this processor lacks: avx512f, "):
        LLM(cpu_kernels="avx512", **SMALL)
    monkeypatch.setattr(build, "cpu_features", frozenset)
    assert best_build() is None
    with caplog.at_level(logging.WARNING, "treadle"):
        LLM(**SMALL)
    assert "they need Linux on x86 with AVX2 or on 64-bit ARM" in caplog.text


@pytest.mark.parametrize(
    ("machine", "line", "expected"),
    [
        ("x86_64", "flags\t\t: fpu sse2 avx2 fma f16c", "avx2"),
        ("x86_64", "flags\t\t: fpu sse2", None),
        ("i686", "flags\t\t: fpu sse2 avx2 fma f16c", None),
        ("aarch64", "Features\t: fp asimd evtstrm crc32 atomics fphp asimdhp asimdrdm lrcpc asimddp", "neon_dotprod"),
        ("aarch64", "Features\t: fp asimd evtstrm crc32 cpuid", "neon"),
        ("riscv64", "isa\t\t: rv64imafdc", None),
    ],
)
def test_the_best_build_follows_from_what_linux_says(machine, line, expected, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(builtins, "open", lambda *_, **__: io.StringIO(f"processor\t: 0\n{line}\n"))
    found = best_build()
    monkeypatch.undo()
    assert found == expected


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cpu_kernels": "avx1024"}, "cpu_kernels"),
        ({"cpu_kernels": "avx2", "dtype": "float32"}, "cpu_kernels"),
        ({"quantization": "int3"}, "quantization"),
        ({"quantization": "int4", "cpu_kernels": "off"}, "quantization"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "bfloat16", "dtype": "float32"}, "kv_cache_dtype"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_invalid_settings_are_refused(options, field):
    with pytest.raises(ConfigError) as caught:
        LLM(**options, **SMALL)
    assert caught.value.field == field


@pytest.mark.slow
def test_torch_gives_the_same_outputs_within_tolerance():
    """Without the kernels, torch computes int8: the log-probabilities are close to those of the kernels."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    text = "The quick brown fox jumps over the lazy dog, and then it sleeps for the rest of the day."
    means = {}
    for quantization in ("int8", "none"):
        found = []
        for kernels in ("auto", "off"):
            llm = LLM(quantization=quantization, cpu_kernels=kernels, dtype="auto", **SMALL)
            (output,) = llm.generate(text, params, use_tqdm=False)
            rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            found.append([entries[token].logprob for token, entries in rows])
        means[quantization] = sum(abs(a - b) for a, b in zip(*found, strict=True)) / len(found[0])
    assert means["int8"] < 0.15
    assert means["none"] < 0.15
