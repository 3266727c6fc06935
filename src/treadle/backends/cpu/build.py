"""Compiles the kernels and keeps the result.

The library is cached under a name made of its sources, its flags, the processor's name, and the compiler's command
and version, so that whatever changes gives another file, and a cache shared by several machines stays right. A file
ends in the SHA-256 of what precedes it, which the loader of shared libraries ignores: a damaged one is compiled
again, because loading it could kill the process.
"""

import atexit
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from treadle.core.errors import TreadleError

logger = logging.getLogger("treadle")

SOURCES = Path(__file__).with_name("csrc")

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "avx2", "f16c")

BUILDS: dict[str, tuple[str, ...]] = {
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avx_vnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon_dotprod": ("asimd", "asimddp", "atomics"),
    "neon": ("asimd",),
}
"""Builds of the kernels, best first, and the processor features (as Linux names them) that each needs."""

_ARM_ARCHITECTURES = {"neon_dotprod": "armv8.2-a+dotprod", "neon": "armv8-a"}
# Without contraction and fast-math the order of every sum is the source's (docs/determinism.md).
_FLAGS = ("-O3", "-std=c++20", "-pthread", "-ffp-contract=off", "-fno-math-errno")
_SHARED = ("-fPIC", "-shared")
_COMPILE_TIMEOUT_S = 300
_VERSION_TIMEOUT_S = 20
_LOAD_TIMEOUT_S = 60
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_OTHER_COMPILER = "install g++, or name another compiler in the environment variable CXX"
_HASH_BYTES = hashlib.sha256().digest_size


class KernelBuildError(TreadleError, RuntimeError):
    """The kernels cannot be compiled or loaded; the message says why, with the compiler's words if it spoke."""


def cpu_features() -> frozenset[str]:
    """What this processor can do, as Linux names it; empty where it does not say."""
    return frozenset((_cpu_info("flags") or _cpu_info("Features")).split())  # on x86, on ARM


def missing_features(build: str) -> tuple[str, ...]:
    """The features that `build` needs and this processor lacks."""
    have = cpu_features()
    return tuple(feature for feature in BUILDS[build] if feature not in have)


def best_build() -> str | None:
    """The best build that this processor runs, None if there is none."""
    if platform.machine() not in ("x86_64", "AMD64", "aarch64"):
        return None
    return next((build for build in BUILDS if not missing_features(build)), None)


def compiler_flags(build: str) -> tuple[str, ...]:
    """The flags with which the kernels of `build` are compiled, whatever they are linked to."""
    if build in _ARM_ARCHITECTURES:
        return (*_FLAGS, f"-march={_ARM_ARCHITECTURES[build]}")
    return (*_FLAGS, *("-m" + name.replace("avx512_", "avx512").replace("avx_", "avx") for name in BUILDS[build]))


def library_path(build: str, extra_flags: tuple[str, ...] = (), source: Path | None = None) -> Path:
    """The compiled library of `build`, compiled now unless it is in the cache.

    If no compiler can be used, the newest library of the same sources, flags and processor is taken from the cache.
    If the cache cannot be written, the library is compiled for this process only.

    Args:
        build: one of BUILDS.
        extra_flags: further flags of the compiler.
        source: what is compiled over the headers in `csrc`; by default the kernels' entry points, `treadle.cpp`.

    Raises:
        KernelBuildError: there is no compiler, it fails, or what it leaves cannot be loaded.
    """
    flags = (*compiler_flags(build), *_SHARED, *extra_flags)
    source = source or SOURCES / "treadle.cpp"
    folder = _cache_folder()
    prefix = f"{source.stem}-{build}-{_hash(*flags, _cpu_info('model name'), *_texts(source))}"
    try:
        compiler = _compiler()
        version = _run([*compiler, "--version"], _VERSION_TIMEOUT_S)
    except KernelBuildError as error:
        kept = _newest(folder, prefix)
        if kept is None:
            raise
        logger.info("no compiler can be used (%s); taking the CPU kernels in %s", error, kept)
        return kept
    target = folder / f"{prefix}-{_hash(*compiler, version)}.so"
    if _is_whole(target):
        return target
    command = [*compiler, *flags, f"-I{SOURCES}", str(source)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Of several processes that start at once, one compiles and the others wait for it.
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                _compile(command, build, target)
        return target
    except OSError as error:
        logger.warning(
            "the CPU kernels cannot be kept in %s (%s), so they are compiled at every start; "
            "set TREADLE_CACHE_DIR to a folder that can be written",
            folder, error,
        )  # fmt: skip
    try:
        own_folder = tempfile.mkdtemp(prefix="treadle-")
        atexit.register(shutil.rmtree, own_folder, ignore_errors=True)
        target = Path(own_folder) / target.name
        _compile(command, build, target)
    except OSError as error:
        raise KernelBuildError(
            f"the compiled kernels cannot be written ({error}); set TREADLE_CACHE_DIR to a folder that can be written"
        ) from error
    return target


def _compile(command: list[str], build: str, target: Path) -> None:
    """Compile to `target`, which appears whole and loadable, or not at all."""
    if target.exists():
        logger.warning("%s is damaged; compiling the CPU kernels (%s) again", target, build)
    else:
        logger.info("compiling the CPU kernels (%s), a few seconds, once on this machine", build)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        _run([*command, "-o", str(output)], _COMPILE_TIMEOUT_S)
        if not output.is_file():
            raise KernelBuildError(f"{shlex.join(command)} left no file; {_OTHER_COMPILER}")
        # In a process of its own, which a broken library may kill.
        _run(
            [sys.executable, "-I", "-S", "-c", _LOAD, str(output)],
            _LOAD_TIMEOUT_S,
            f"{shlex.join(command)} left a file that cannot be loaded: {_OTHER_COMPILER}, or, if {target.parent} is "
            f"on a file system mounted with noexec, set TREADLE_CACHE_DIR to a folder that is not",
        )
        with output.open("r+b") as file:
            content = file.read()
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(output, target)
    logger.debug("compiled %s in %.1f s", target, time.monotonic() - start)


def _is_whole(path: Path) -> bool:
    """Whether there is such a library, and its content is what was compiled."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_HASH_BYTES]).digest() == content[-_HASH_BYTES:]


def _newest(folder: Path, prefix: str) -> Path | None:
    """The newest whole library in `folder` whose name begins with `prefix`."""
    whole = [path for path in folder.glob(f"{prefix}-*.so") if _is_whole(path)]
    return max(whole, key=lambda path: path.stat().st_mtime, default=None)


def _run(command: list[str], timeout_s: float, advice: str = _OTHER_COMPILER) -> str:
    """What `command` writes to its output; KernelBuildError with `advice` if it fails or takes longer."""
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # a group of its own, so that it can be ended with all that it has started
        ) as process:
            try:
                output, words = process.communicate(timeout=timeout_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{shlex.join(command)} took more than {timeout_s} s; {advice}") from error
    except OSError as error:
        raise KernelBuildError(f"{shlex.join(command)} cannot be run ({error}); {advice}") from error
    if process.returncode:
        raise KernelBuildError(
            f"{shlex.join(command)} failed with status {process.returncode}; {advice}:\n{words.strip()[-2000:]}"
        )
    return output


def _compiler() -> list[str]:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++"]:
        try:
            command = shlex.split(name)
        except ValueError as error:
            raise KernelBuildError(
                f"CXX={name}: not a command line ({error}); set it to a compiler and its options, like g++ -m64"
            ) from error
        if command and shutil.which(command[0]):
            return command
    raise KernelBuildError(
        f"CXX={wanted}: there is no such program; set it to a C++ compiler, or unset it"
        if wanted
        else "no C++ compiler was found (g++ or c++); install one, or name it in the environment variable CXX"
    )


def _cache_folder() -> Path:
    own = os.environ.get("TREADLE_CACHE_DIR")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "treadle"
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        raise KernelBuildError(
            f"the compiled kernels cannot be kept in {folder} ({error}); set TREADLE_CACHE_DIR to a folder "
            f"that can be written"
        ) from error


def _texts(source: Path) -> list[str]:
    """Names and contents of all that is compiled."""
    texts = []
    try:
        for path in sorted({*SOURCES.rglob("*.h"), *SOURCES.glob("*.cpp"), source}):
            texts += [path.name, path.read_text(encoding="utf-8")]
    except (OSError, ValueError) as error:
        raise KernelBuildError(
            f"the kernels' sources cannot be read ({type(error).__name__}: {error}); reinstall Treadle"
        ) from error
    return texts


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


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
