"""Builds engines around loaded weights, so that tests of many schedules load a model only once."""

import torch

from treadle import SamplingParams
from treadle.backends.cpu.backend import CPUBackend
from treadle.backends.cpu.model import NativeModel
from treadle.backends.torch.backend import TorchBackend
from treadle.core.clock import SystemClock
from treadle.core.config import CacheConfig, RequestLimits, SchedulerConfig
from treadle.engine import Engine
from treadle.runner import ModelRunner
from treadle.scheduler import Scheduler
from treadle.text.grammar import GrammarCompiler
from treadle.text.input_processor import InputProcessor, RequestOptions
from treadle.text.output_processor import OutputProcessor


class TestEngine:
    """An engine on given weights that checks its invariants in every step.

    Args:
        loaded, model: the model's files and its forward pass.
        runner: function that wraps the runner.
        child: another process that runs the steps, see child_runner.
        find_grammar: function that returns the compiled grammar of a text; by default the runner compiles it.
    """

    __test__ = False

    def __init__(
        self,
        loaded,
        model,
        *,
        num_blocks=400,
        block_size=16,
        enable_prefix_caching=True,
        num_host_blocks=0,
        runner=None,
        child=None,
        find_grammar=None,
        int8_kv=False,
        threads=2,
        **scheduler,
    ):
        scheduler.setdefault("max_model_len", min(2048, num_blocks * block_size))
        scheduler.setdefault("max_num_seqs", 32)
        cache = CacheConfig(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        clock = SystemClock()
        self.scheduler = Scheduler(SchedulerConfig(**scheduler), cache, clock)
        limits = RequestLimits(max_model_len=scheduler["max_model_len"], vocab_size=model.config.vocab_size)
        self.inputs = InputProcessor(loaded.tokenizer, limits, loaded.eos_token_ids)
        shape = {
            "num_blocks": num_blocks, "num_host_blocks": num_host_blocks, "block_size": block_size,
            "int8_kv": int8_kv, "threads": threads, "max_num_seqs": scheduler["max_num_seqs"],
            "max_model_len": scheduler["max_model_len"],
        }  # fmt: skip
        if child is None:
            self.runner = make_runner(loaded, model, **shape, find_grammar=find_grammar)
        else:
            self.runner = child.runner(**shape)
        if runner is not None:
            self.runner = runner(self.runner)
        self.reports = []
        self.engine = Engine(
            self.scheduler, self.runner, OutputProcessor(loaded.tokenizer), clock, [self], check_invariants=True
        )

    def on_step(self, report, outputs, finished):
        if report is not None:
            self.reports.append(report)

    @property
    def plans(self):
        return [report.plan for report in self.reports]

    @property
    def preemptions(self):
        return [preemption for report in self.reports for preemption in report.preempted]

    def add(self, name, prompt, params, *, stream=False, **options):
        (request,) = self.inputs.make_requests(
            [name], [prompt], [params], [RequestOptions(**options)], arrival_time=0.0
        )
        self.engine.add_request(request, stream=stream)
        return request

    def run(self, on_step=lambda step: None):
        """Step until all requests have finished; return name → last RequestOutput."""
        results = {}
        step = 0
        while self.engine.has_unfinished_requests:
            step += 1
            on_step(step)
            for output in self.engine.step():
                results[output.request_id] = output
        assert self.scheduler.kv.num_available_blocks == self.scheduler.kv.pool.num_blocks
        return results

    def generate(self, prompts, params, on_step=lambda step: None):
        """Return the output token ids for each prompt."""
        for i, prompt in enumerate(prompts):
            self.add(str(i), list(prompt), params)
        results = self.run(on_step)
        return [results[str(i)].outputs[0].token_ids for i in range(len(prompts))]


def make_runner(
    loaded, model, *, num_blocks, num_host_blocks, block_size, int8_kv, threads, max_num_seqs, max_model_len,
    find_grammar=None,
):  # fmt: skip
    """Return a new runner, which has received no plan yet; it compiles grammars itself."""
    grammars = GrammarCompiler(loaded.tokenizer, model.config.vocab_size, loaded.eos_token_ids)
    return ModelRunner(
        make_backend(model, num_blocks, num_host_blocks, block_size, int8_kv, threads),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        find_grammar=find_grammar or grammars.find,
    )


def make_backend(model, num_blocks, num_host_blocks, block_size, int8_kv, threads):
    """Return a backend whose KV memory is filled with NaN, so that reading an unwritten slot changes outputs."""
    if isinstance(model, NativeModel):
        backend = CPUBackend(model, block_size=block_size, int8_kv=int8_kv, threads=threads)
        backend.allocate(num_blocks, num_host_blocks)
        backend.pool.fill_(0xFF)  # NaN both as bfloat16 and as float32
        return backend
    backend = TorchBackend(model, block_size=block_size, int8_kv=int8_kv)
    backend.allocate(num_blocks, num_host_blocks)
    backend.storage.keys.fill_(float("nan"))
    backend.storage.values.fill_(float("nan"))
    return backend


@torch.inference_mode()
def logits_of(loaded, model, prompt):
    """Return the logits at every position, computed by a paged prefill in chunks of 50 tokens."""
    seen = []

    class Spy:
        supports_lora = False

        def __init__(self, runner):
            self._runner = runner
            self._forward = model.forward

        def execute(self, plan):
            model.forward = self._spy
            try:
                return self._runner.execute(plan)
            finally:
                model.forward = self._forward

        def _spy(self, *args):
            hidden = self._forward(*args)
            seen.append(model.compute_logits(hidden))
            return hidden

    engine = TestEngine(loaded, model, runner=Spy, max_num_batched_tokens=50)
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
    return torch.cat(seen)
