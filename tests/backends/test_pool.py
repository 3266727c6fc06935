"""The pool of threads that computes a step."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support.native import RUNNABLE, SANITIZED
from support.tiny import make_model, make_prompts
from treadle import LLM, SamplingParams
from treadle.backends.cpu.build import SOURCES, best_build, compiler_flags

STRESS = Path(__file__).parents[1] / "support" / "pool_stress.cpp"

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="this processor has no native kernels")


@pytest.mark.skipif(SANITIZED, reason="the programs have their own sanitizers")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_every_item_of_every_loop_is_done_once_and_loops_keep_their_order(tmp_path, sanitizer):
    program = tmp_path / "stress"
    subprocess.run(
        ["g++", *compiler_flags(best_build()), "-O1", "-g", f"-fsanitize={sanitizer}",
         "-fno-sanitize-recover=all", f"-I{SOURCES}", str(STRESS), "-o", str(program)],
        check=True,
    )  # fmt: skip
    # ThreadSanitizer cannot map its memory where addresses are random in many bits.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    result = subprocess.run([*fixed, str(program)], stderr=subprocess.PIPE, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture
def folder(tmp_path):
    make_model("tiny", tmp_path)
    return str(tmp_path)


def make_llm(folder, threads):
    return LLM(
        folder, num_threads=threads, quantization="int8", num_kv_blocks=60, max_num_seqs=6, swap_space=0,
        log_stats_interval_s=0,
    )  # fmt: skip


def bits(llm):
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True, logprobs=2)
    outputs = llm.generate(make_prompts([40, 3, 17, 60]), params, use_tqdm=False)
    return [
        (one.token_ids, [{i: entry.logprob for i, entry in position.items()} for position in one.logprobs])
        for output in outputs
        for one in output.outputs
    ]


def test_engines_that_compute_at_the_same_time_give_the_same_bits(folder):
    engines = [make_llm(folder, threads) for threads in (1, 2, 4)]
    expected = bits(engines[0])
    results = {}

    def compute(i):
        results[i] = [bits(engines[i]) for _ in range(4)]

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [expected] * 4 for i in range(len(engines))}


def test_neighbours_that_take_the_processors_change_no_bit(folder):
    alone = bits(make_llm(folder, 1))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        llm = make_llm(folder, 3)
        assert [bits(llm) for _ in range(3)] == [alone] * 3
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_threads_without_work_use_no_processor_time(folder):
    llm = make_llm(folder, 4)
    bits(llm)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1  # four threads that spin would use 0.5 s or more
