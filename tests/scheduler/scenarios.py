"""A dozen seeded runs on the toy runner that cover all features of the scheduler, and one line of text per plan.

The lines are stored in `recorded/`, so that a change of the scheduler shows which plans change, and how.
"""

import random
import zlib

from treadle.core.lora import LoRARequest
from treadle.testing.toy import ToyEngine

SMALL = {
    "num_blocks": 20, "block_size": 4, "max_model_len": 60, "admission_headroom": 0, "long_prefill_token_threshold": 0
}  # fmt: skip

SCENARIOS = {
    "chunked": {**SMALL},
    "chunked-headroom": {**SMALL, "admission_headroom": 1, "max_num_batched_tokens": 40},
    "three-phase": {**SMALL, "scheduler": "three-phase"},
    "prefill-first": {**SMALL, "scheduler": "prefill-first", "max_consecutive_prefills": 3},
    "phased": {**SMALL, "scheduler": "phased", "max_consecutive_prefills": 3},
    "swap": {**SMALL, "num_host_blocks": 40, "preemption_mode": "swap", "groups": 0.3},
    "groups-again": {**SMALL, "preemption_mode": "recompute", "groups": 0.4},
    "beams": {**SMALL, "num_host_blocks": 30, "beams": 0.4},
    "priority": {**SMALL, "num_host_blocks": 30, "order": "priority", "groups": 0.2},
    "shortest-first": {**SMALL, "order": "shortest-first", "age_limit_s": 20.0},
    "fair": {**SMALL, "order": "fair"},
    "deadline": {**SMALL, "order": "deadline"},
    "adapters": {**SMALL, "max_loras": 1, "adapters": 0.6, "age_limit_s": 15.0},
    "shared-beginnings": {**SMALL, "num_blocks": 40, "beginnings": 0.8, "aborts": 0.2},
    "long-prompts": {**SMALL, "num_blocks": 40, "long_prefill_token_threshold": None, "max_num_batched_tokens": 10},
    "long-prompts-priority": {
        **SMALL,
        "num_blocks": 30,
        "num_host_blocks": 30,
        "order": "priority",
        "long_prefill_token_threshold": 10,
        "groups": 0.2,
        "age_limit_s": 20.0,
    },
    "no-cache": {**SMALL, "enable_prefix_caching": False, "block_size": 5, "groups": 0.2},
}


def run(name):
    """Return the scenario's plans, one line each."""
    options = dict(SCENARIOS[name])
    groups, beams = options.pop("groups", 0.0), options.pop("beams", 0.0)
    adapters, beginnings = options.pop("adapters", 0.0), options.pop("beginnings", 0.2)
    aborts = options.pop("aborts", 0.0)
    rng = random.Random(name)
    engine = ToyEngine(**options)
    lines = []

    def step():
        if engine.scheduler.num_unfinished_requests:
            engine.step(before_update=lambda report: lines.append(line_of(engine.scheduler, report.plan)))

    beginning = [rng.randrange(50) for _ in range(12)]
    for i in range(28):
        prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
        if rng.random() < beginnings:
            prompt = beginning[: rng.choice([8, 12])] + prompt[:18]
        is_search = rng.random() < beams
        is_group = rng.random() < groups
        adapter = rng.randrange(1, 4) if rng.random() < adapters else 0
        engine.add(
            f"r{i}", prompt, rng.randrange(1, 25), stop_ids=rng.choice([(), (), (0, 1)]),
            n=rng.randrange(2, 4) if is_search or is_group else 1,
            params={"use_beam_search": True} if is_search else {},
            priority=rng.randrange(3), tenant=rng.choice("xxy"), deadline=rng.choice([i + 9.0, i + 40.0]),
            lora=LoRARequest(f"a{adapter}", adapter) if adapter else None,
        )  # fmt: skip
        for _ in range(rng.randrange(4)):
            step()
        if rng.random() < aborts:
            engine.scheduler.abort(f"r{rng.randrange(i + 1)}")
            engine.collect()
    while engine.scheduler.num_unfinished_requests:
        step()
    return lines


def line_of(scheduler, plan):
    """Describe a plan in one line: computed tokens, preemptions, waiting requests and block moves.

    `r3:10+4=1` computes 4 tokens from position 10 and samples one; `r3/2:17` decodes sequence 2 at position 17; `~6`
    asks for candidates. The last number is a checksum of the block tables of all running sequences.
    """
    batch, report = scheduler.batch, scheduler.report
    ran, decodes = [], []
    for i, row in enumerate(plan.rows.tolist()):
        name, start = _name(batch.sequences[row]), plan.starts[i]
        if plan.num_prefills <= i < plan.num_prefills + plan.num_decodes:
            decodes.append(f"{name}:{start}" + (f"+{plan.counts[i]}" if plan.counts[i] > 1 else ""))
            continue
        num_candidates = 0 if plan.candidates is None else plan.candidates[i]
        wanted = f"~{num_candidates}" if num_candidates else f"={plan.samples[i]}" if plan.samples[i] else ""
        ran.append(f"{name}:{start}+{plan.counts[i]}{wanted}")
    ran += decodes
    parts = [" ".join(ran)]
    parts += [f"{p.request_id} falls for {p.for_request_id} by {p.mode.value}" for p in report.preempted]
    parts += [f"{name} comes back" for name in report.swapped_in]
    parts += [f"{name} is given up" for name in report.ignored]
    parts += [f"{r.request_id} waits: {r.reason.value}" for r in report.refusals]
    for word, pairs in (
        ("out", plan.moves.swap_out), ("in", plan.moves.swap_in), ("copy", plan.moves.copy)
    ):  # fmt: skip
        if len(pairs):
            parts.append(f"{word} " + " ".join(f"{source}>{target}" for source, target in pairs))
    tables = [(_name(seq), scheduler.kv.block_table(seq)) for seq in batch.running_sequences()]
    return " | ".join([*parts, f"{zlib.crc32(repr(tables).encode()):08x}"])


def _name(seq):
    return f"{seq.request.request_id}/{seq.index}" if seq.index else seq.request.request_id
