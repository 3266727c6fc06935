"""Compares Treadle and its peers on the same requests, model and machine, in turns; also probes the machine.

    python bench/compare.py                                   all workloads, all installed engines
    python bench/compare.py --workloads a d --engines treadle openvino --rounds 5
    python bench/compare.py --model model.gguf                the engines that can read the file, on another model

Each engine runs in its own process and environment (bench/README.md says how to install the peers) and is stopped
during the turns of the others. Every round has fresh prompts, the same for all engines. Figures are medians over the
rounds; ratios are computed per round. Sampling is greedy and end-of-sequence is ignored. Workloads:

    a  prompt 128, 64 new tokens, for 1, 8, 32 and 64 sequences: prefill and decode separately
    b  128 requests of mixed lengths: prompt 16-512, output 16-256
    c  32 requests that share a prefix of 512 tokens: 32 more prompt tokens, 64 new tokens
    d  16 sequences at context 1024, 64 new tokens: prefill and decode separately
    e  the first 64 requests of a public trace of conversations (Azure 2023), lengths divided by 4

Prefill is the time of a run that asks for one token per request; decode is the additional time of a longer run.
"""

import argparse
import contextlib
import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from treadle.core.config import DEFAULT_MODEL
from treadle.models.registry import find_model

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
TRACE = HERE.parent.parent / "shared" / "data" / "azure-llm-2023-conv.csv"

ENGINES = {
    "treadle": (None, "treadle", "model", []),
    "treadle-int8": (None, "treadle", "model", ["quantization=int8"]),
    "treadle-bf16": (None, "treadle", "model", ["dtype=bfloat16"]),
    "openvino": ("openvino", "openvino", "gguf", []),
    "llama.cpp": ("llama", "llama", "gguf", []),
    "vllm": ("vllm", "vllm", "safetensors", []),
    "transformers": (None, "transformers", "gguf", []),
}
"""Name → (environment under .peers, worker, format of the model, further arguments)."""


class Engine:
    """A worker process that is stopped except during its turns."""

    def __init__(self, name: str, peers: Path, model_path: str = DEFAULT_MODEL) -> None:
        environment, worker, form, arguments = ENGINES[name]
        python = Path(sys.executable) if environment is None else peers / environment / "bin" / "python"
        if form == "safetensors" and model_path != DEFAULT_MODEL:
            raise FileNotFoundError("cannot read a GGUF file")
        gguf = find_model(model_path) if model_path == DEFAULT_MODEL else model_path
        model = {"model": model_path, "gguf": str(gguf), "safetensors": str(peers / "smollm2-bf16")}[form]
        if not python.exists():
            raise FileNotFoundError(f"{python}: not installed")
        if form == "safetensors" and not Path(model).exists():
            raise FileNotFoundError(f"{model}: run bench/export_safetensors.py")
        self.log = Path("/tmp") / f"treadle-bench-{name}-{os.getpid()}.log"
        self._process = subprocess.Popen(
            [str(python), str(HERE / "workers" / f"{worker}_worker.py"), model, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            start_new_session=True,
        )
        self.title = self._read()["ready"]
        self._signal(signal.SIGSTOP)

    def run(self, requests: list[list]) -> dict:
        """Time one batch."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"requests": requests}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended: {self.log.read_text()[-1500:]}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Prompts:
    """Random token ids, different for each use."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(100, 40000) for _ in range(count)]

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def trace_lengths(count: int) -> list[tuple[int, int]]:
    if not TRACE.exists():
        raise FileNotFoundError(f"workload e needs {TRACE}")
    with TRACE.open() as file:
        rows = [row for _, row in zip(range(count), csv.DictReader(file), strict=False)]
    return [
        (max(1, min(1024, int(row["ContextTokens"]) // 4)), max(1, min(256, int(row["GeneratedTokens"]) // 4)))
        for row in rows
    ]


def workloads(letters: list[str], seed: int) -> list[tuple[str, list[list], bool]]:
    """(name, requests, whether prefill and decode are reported separately), with prompts of this seed."""
    prompts = Prompts(seed)
    found = []
    if "a" in letters:
        found += [(f"a {n} × (128 + 64)", [[prompts.ids(128), 64] for _ in range(n)], True) for n in (1, 8, 32, 64)]
    if "b" in letters:
        lengths = Prompts(0)  # the same in every round
        mixed = [(lengths.between(16, 512), lengths.between(16, 256)) for _ in range(128)]
        found.append(("b 128 mixed", [[prompts.ids(n), m] for n, m in mixed], False))
    if "c" in letters:
        shared = prompts.ids(512)
        found.append(("c 32 share 512", [[shared + prompts.ids(32), 64] for _ in range(32)], False))
    if "d" in letters:
        found.append(("d 16 × (1024 + 64)", [[prompts.ids(1024), 64] for _ in range(16)], True))
    if "e" in letters:
        found.append(("e 64 of a trace", [[prompts.ids(n), m] for n, m in trace_lengths(64)], False))
    return found


def measure(engine: Engine, requests: list[list], apart: bool, warm: list[list] | None) -> dict[str, float]:
    """Tokens/s: prefill and decode, or output tokens of the whole run."""
    if not apart:
        answer = engine.run(requests)
        return {"output": answer["num_tokens"] / answer["seconds"], "peak_mib": answer["peak_mib"]}
    # Different prompts for each run, so that no run hits the prefix cache of another.
    first = engine.run([[ids, 1] for ids, _ in warm])
    whole = engine.run(requests)
    prompt_tokens = sum(len(ids) for ids, _ in requests)
    return {
        "prefill": prompt_tokens / first["seconds"],
        "decode": (whole["num_tokens"] - len(requests)) / max(1e-9, whole["seconds"] - first["seconds"]),
        "peak_mib": whole["peak_mib"],
    }


def build_probe() -> Path:
    target = Path("/tmp") / f"treadle-bench-probe-{os.getuid()}"
    command = ["g++", "-O3", "-march=native", "-fopenmp", str(HERE / "probe.cpp"), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file (default: the embedded model)")
    parser.add_argument("--workloads", nargs="+", default=list("abcde"), choices=list("abcde"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help="folder of the peers' environments (default: %(default)s)"
    )
    parser.add_argument(
        "--save", type=Path, default=HERE / "results", help="folder for the tables (default: %(default)s)"
    )
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stopped workers would outlive us
    probe = build_probe()
    engines: dict[str, Engine] = {}
    for name in args.engines:
        try:
            engines[name] = Engine(name, args.peers, args.model)
            print(f"{name}: {engines[name].title}", flush=True)
        except (FileNotFoundError, RuntimeError) as error:
            print(f"{name}: not available ({error})", flush=True)
    titles = {name: engine.title for name, engine in engines.items()}
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    probes = []
    try:
        for engine in engines.values():  # warm up: pages, caches, thread pools, kernels made for a shape
            for count in (1, 1, 8, 32):
                engine.run([[Prompts(99 + i).ids(128), 8] for i in range(count)])
        for round_number in range(args.rounds):
            warm = workloads(args.workloads, 1000 + round_number)
            for i, (name, requests, apart) in enumerate(workloads(args.workloads, round_number)):
                probes.append(json.loads(subprocess.run([probe], capture_output=True, check=True).stdout))
                for engine_name, engine in list(engines.items()):
                    try:
                        figures = measure(engine, requests, apart, warm[i][1])
                    except (RuntimeError, BrokenPipeError) as error:
                        print(f"{engine_name}: dropped from here on ({error})", flush=True)
                        engines.pop(engine_name).close()
                        continue
                    results.setdefault(name, {}).setdefault(engine_name, []).append(figures)
                    shown = ", ".join(f"{k} {v:.0f}" for k, v in figures.items() if k != "peak_mib")
                    print(f"round {round_number + 1}  {name:<20} {engine_name:<14} {shown}", flush=True)
    finally:
        for engine in engines.values():
            engine.close()

    machine = {key: [p[key] for p in probes if key in p] for key in probes[0]}
    table = render(results, titles, machine)
    print("\n" + table)
    args.save.mkdir(exist_ok=True)
    stem = args.save / time.strftime("compare-%Y%m%d-%H%M%S")
    stem.with_suffix(".md").write_text(table)
    stem.with_suffix(".json").write_text(
        json.dumps({"engines": titles, "machine": machine, "results": results}, indent=1)
    )
    print(f"saved: {stem}.md and .json")


def render(results: dict, titles: dict[str, str], machine: dict[str, list[float]]) -> str:
    """A table of medians; each peer's figure is followed by Treadle's speed relative to it, for each format."""
    ours = [name for name in titles if name.startswith("treadle")]
    lines = [
        "tokens/s; in brackets, how many times as fast " + " / ".join(ours) + " are",
        "",
        "| workload | " + " | ".join(f"{name} ({title})" for name, title in titles.items()) + " |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for name, by_engine in results.items():
        for figure in ("prefill", "decode", "output"):
            if figure not in next(iter(by_engine.values()))[0]:
                continue
            cells = []
            for engine in titles:
                rounds = by_engine.get(engine)
                if not rounds:
                    cells.append("–")
                    continue
                values = [r[figure] for r in rounds]
                cell = f"{statistics.median(values):,.0f}"
                if engine not in ours and ours:
                    ratios = [
                        statistics.median(a[figure] / b[figure] for a, b in zip(by_engine[own], rounds, strict=False))
                        for own in ours
                    ]
                    cell += " (" + " / ".join(f"{ratio:.2f}" for ratio in ratios) + ")"
                cells.append(cell)
            lines.append(f"| {name}, {figure} | " + " | ".join(cells) + " |")
    peaks = [
        max((r["peak_mib"] for by in results.values() for r in by.get(engine, [])), default=0) for engine in titles
    ]
    lines.append("| peak memory, MiB | " + " | ".join(f"{peak:,.0f}" for peak in peaks) + " |")
    ranges = [f"{key} {min(values):g} – {max(values):g}" for key, values in machine.items()]
    return "\n".join([*lines, "", "Probe of the machine between the runs: " + ", ".join(ranges), ""])


if __name__ == "__main__":
    main()
