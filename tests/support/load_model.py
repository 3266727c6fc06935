"""A process that loads models: it reads a path and an option of `cpu_kernels` per line, and answers in JSON."""

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path


def main():
    from treadle import LLM, SamplingParams
    from treadle.core.errors import ConfigError, ModelLoadError, TreadleError

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def generate(llm):
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1)
        (output,) = llm.generate([[0]], params, use_tqdm=False)
        found = {"num_tokens": len(output.outputs[0].token_ids), "error": output.error}
        messages = [{"role": "user", "content": "abc"}]
        for call in (
            lambda: llm.generate("ab\n c\u00e9", params, use_tqdm=False),
            lambda: llm.chat(messages, params),
        ):
            with contextlib.suppress(TreadleError):
                call()
        return found

    def attempt(path, kernels):
        try:
            llm = LLM(
                path, cpu_kernels=kernels, num_kv_blocks=4, max_num_seqs=2, swap_space=0, log_stats_interval_s=0
            )
        except (ModelLoadError, ConfigError) as error:
            return {"refused": str(error)}
        return generate(llm)

    for line in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, start = peak_bytes(), time.process_time()
        try:
            answer = attempt(*json.loads(line))
        except BaseException:
            answer = {"raised": traceback.format_exc()}
        answer["seconds"], answer["bytes"] = time.process_time() - start, peak_bytes() - before
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def peak_bytes():
    """The most memory that the process has had."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
