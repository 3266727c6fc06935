"""Compiles the kernels and keeps the result.

The library is cached under a name made of its sources, its flags, the compiler's version and the processor's
name, so that whatever changes gives another file, and a cache shared by several machines stays right.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

logger = logging.getLogger("treadle")

SOURCES = Path(__file__).with_name("csrc")

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "avx2")

BUILDS: dict[str, tuple[str, ...]] = {
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma"),
}
"""Builds of the kernels, best first, and the processor features (as Linux names them) that each needs."""

# Without contraction and fast-math the order of every sum is the source's (docs/determinism.md).
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")
_TIMEOUT_S = 300


class KernelBuildError(RuntimeError):
    """The kernels cannot be compiled; the message says why, with the compiler's words if it spoke."""


def cpu_features() -> frozenset[str]:
    """What this processor can do, as Linux names it; empty where it does not say."""
    return frozenset(_cpu_info("flags").split())


def missing_features(build: str) -> tuple[str, ...]:
    """The features that `build` needs and this processor lacks."""
    have = cpu_features()
    return tuple(feature for feature in BUILDS[build] if feature not in have)


def best_build() -> str | None:
    """The best build that this processor runs, None if there is none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    return next((build for build in BUILDS if not missing_features(build)), None)


def library_path(build: str, extra_flags: tuple[str, ...] = (), source: Path | None = None) -> Path:
    """The compiled library of `build`, compiled now unless it is in the cache.

    Args:
        build: one of BUILDS.
        extra_flags: further flags of the compiler.
        source: what is compiled over the headers in `csrc`; by default the kernels' entry points, `treadle.cpp`.

    Raises:
        KernelBuildError: there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = _compiler()
    flags = (*_FLAGS, *_isa_flags(build), *extra_flags)
    source = source or SOURCES / "treadle.cpp"
    folder = _cache_folder()
    target = folder / f"{source.stem}-{build}-{_key(compiler, flags, source)}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Of several processes that start at once, one compiles and the others wait for it.
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                _compile(compiler, flags, source, target)
    except OSError as error:
        raise KernelBuildError(
            f"the kernels cannot be kept in {folder} ({error}); set TREADLE_CACHE_DIR to a folder that can be written"
        ) from error
    return target


def _compile(compiler: list[str], flags: tuple[str, ...], source: Path, target: Path) -> None:
    logger.info("compiling the CPU kernels (%s), a few seconds, once on this machine", target.name.split("-")[1])
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        command = [*compiler, *flags, f"-I{SOURCES}", str(source), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise KernelBuildError(f"{shlex.join(command)} took more than {_TIMEOUT_S} s") from error
        if done.returncode:
            raise KernelBuildError(
                f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()[-2000:]}"
            )
        os.replace(output, target)
    logger.debug("compiled %s in %.1f s", target, time.monotonic() - start)


def _compiler() -> list[str]:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++"]:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise KernelBuildError(
        f"CXX={wanted}: there is no such program"
        if wanted
        else "no C++ compiler was found (g++ or c++); install one, or name it in the environment variable CXX"
    )


def _isa_flags(build: str) -> tuple[str, ...]:
    return tuple("-m" + feature.replace("avx512_", "avx512") for feature in BUILDS[build])


def _cache_folder() -> Path:
    own = os.environ.get("TREADLE_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "treadle"


def _key(compiler: list[str], flags: tuple[str, ...], source: Path) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    parts = [version, *compiler, *flags, _cpu_info("model name")]
    for path in sorted({*SOURCES.iterdir(), source}):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_info(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo, "" if there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == field:
                    return value.strip()
    except OSError:
        pass
    return ""
