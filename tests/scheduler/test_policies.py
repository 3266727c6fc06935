"""Third-party policies: checked when loaded, harmless when they fail, and tested like the built-in ones."""

import logging
import math
import random

import pytest

from support.examples import share
from treadle.assembly.engine_config import EngineConfig
from treadle.core.errors import ConfigError, EngineError
from treadle.scheduler.phases import Phases
from treadle.scheduler.policies import Cut, PhasePolicy, QueueOrder, VictimPolicy
from treadle.scheduler.policies.registry import ORDERS, PHASES, VICTIMS
from treadle.testing import check_policy
from treadle.testing.policies import Trace
from treadle.testing.toy import ToyEngine, toy_continuation

BUILTIN = [cls for kind in (PHASES, ORDERS, VICTIMS) for cls in kind.builtin.values()]


@pytest.mark.parametrize("policy", BUILTIN, ids=lambda policy: policy.__name__)
def test_builtin_policies_pass_check_policy(policy):
    check_policy(policy, num_traces=share(4, at_least=2))


class RandomPhases(PhasePolicy):
    """The phases in any order, any number of times; all phases if nothing was scheduled."""

    def __init__(self):
        self._rng = random.Random(0)

    def run(self, step):
        verbs = [
            step.decodes, step.chunks, step.swapped, step.admissions, lambda: step.chunks(Cut.ONLY_FIRST),
            lambda: step.chunks(Cut.NEVER), lambda: step.admissions(Cut.ONLY_FIRST),
        ]  # fmt: skip
        for _ in range(self._rng.randint(0, 6)):
            self._rng.choice(verbs)()
        if step.is_empty:
            step.admissions()
            step.decodes()
            step.chunks()
            step.swapped()


class ReversedPhases(PhasePolicy):
    """Admissions first, decodes last."""

    def run(self, step):
        step.admissions()
        step.swapped()
        step.chunks()
        step.decodes()


class ChangingOrder(QueueOrder):
    """A different order in every step, with displacement."""

    displaces = True
    changes_while_waiting = True

    def __init__(self):
        self._step = 0

    def key(self, request):
        return float((request.arrival_number * 7 + self._step * 5) % 11)

    def is_stale(self, moment):
        self._step += 1
        return True


class Shuffled(VictimPolicy):
    """Victims in random order."""

    def __init__(self):
        self._rng = random.Random(1)

    def order(self, candidates):
        return self._rng.sample(list(candidates), len(list(candidates)))


@pytest.mark.parametrize("policy", [RandomPhases, ReversedPhases, ChangingOrder, Shuffled])
def test_arbitrary_policies_lose_no_requests(policy):
    check_policy(policy, num_traces=share(8, at_least=4))


class Lazy(QueueOrder):
    """An order without a key."""


class NoHooks:
    needs_whole_prompts = False

    def run(self, step):
        step.decodes()


class TwoArguments(QueueOrder):
    def key(self, request, now):
        return 0.0


class WrongFlag(QueueOrder):
    displaces = "yes"

    def key(self, request):
        return 0.0


class PlainFromConfig(PhasePolicy):
    def from_config(self, config):
        return self

    def run(self, step):
        step.decodes()


class FailsInFromConfig(VictimPolicy):
    @classmethod
    def from_config(cls, config):
        raise RuntimeError("no luck")

    def order(self, candidates):
        return candidates


@pytest.mark.parametrize(
    ("setting", "policy", "message"),
    [
        ("order", Lazy, r"order: 'Lazy' has no method key\(\), which every order needs"),
        ("scheduler", NoHooks, r"scheduler: 'NoHooks' has no method added\(\)"),
        ("order", TwoArguments, r"order: 'TwoArguments': key\(\) must take 1 argument.s. besides self .*now"),
        ("order", WrongFlag, "order: 'WrongFlag': displaces must be True or False, got 'yes'"),
        ("scheduler", PlainFromConfig, r"scheduler: 'PlainFromConfig': from_config\(\) must be a classmethod"),
        (
            "victim_policy",
            FailsInFromConfig,
            r"'FailsInFromConfig' failed in from_config\(\): RuntimeError\('no luck'\)",
        ),
        (
            "victim_policy",
            Shuffled(),
            "victim_policy: must be the name of a victim policy or a class, got <.*Shuffled",
        ),
        ("victim_policy", "none", "unknown victim policy 'none'; known: last-in-rank, least-computed"),
    ],
)
def test_a_policy_is_checked_when_it_is_loaded(setting, policy, message):
    with pytest.raises(ConfigError, match=message):
        ToyEngine(**{setting: policy})


def test_engine_config_checks_policies_before_a_model_is_loaded():
    with pytest.raises(ConfigError, match=r"order: 'Lazy' has no method key\(\)"):
        EngineConfig(order=Lazy)


class Whole(PhasePolicy):
    needs_whole_prompts = True

    def run(self, step):
        step.decodes()
        step.swapped()
        step.admissions(Cut.NEVER)


def test_needs_whole_prompts_raises_the_required_token_budget():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: must be at least max_model_len \(100\)"):
        ToyEngine(scheduler=Whole, max_model_len=100, max_num_batched_tokens=16)
    assert EngineConfig(scheduler=Whole).scheduler_config(max_model_len=4000).max_num_batched_tokens == 4000


def failing(base, method, after, how):
    """Return a subclass of `base` whose `method` fails after `after` calls."""
    calls = 0

    def fails(self, *args):
        nonlocal calls
        calls += 1
        return how(self, *args) if calls > after else getattr(base, method)(self, *args)

    return type("Failing", (base,), {method: fails, "changes_while_waiting": True})


def raises(self, *args):
    raise ValueError("a mistake")


def raises_halfway(self, step):
    step.decodes()
    step.chunks()
    raise ValueError("a mistake")


FAILURES = {
    "key raises": ("order", ORDERS, "priority", "key", raises),
    "key is NaN": ("order", ORDERS, "priority", "key", lambda self, request: math.nan),
    "key is text": ("order", ORDERS, "priority", "key", lambda self, request: "first"),
    "key is None": ("order", ORDERS, "priority", "key", lambda self, request: None),
    "is_stale raises": ("order", ORDERS, "shortest-first", "is_stale", raises),
    "added raises": ("order", ORDERS, "priority", "added", raises),
    "admitted raises": ("order", ORDERS, "fair", "admitted", raises),
    "ended raises": ("order", ORDERS, "fair", "ended", raises),
    "tokens raises": ("order", ORDERS, "priority", "tokens", raises),
    "run raises": ("scheduler", PHASES, "chunked", "run", raises),
    "run raises halfway": ("scheduler", PHASES, "chunked", "run", raises_halfway),
    "run passes a wrong argument": (
        "scheduler",
        PHASES,
        "chunked",
        "run",
        lambda self, step: step.admissions("whole"),
    ),
    "run does nothing": ("scheduler", PHASES, "chunked", "run", lambda self, step: None),
    "order raises": ("victim_policy", VICTIMS, "least-computed", "order", raises),
    "order repeats": ("victim_policy", VICTIMS, "least-computed", "order", lambda self, c: [c[0]] * 9),
    "order is not iterable": ("victim_policy", VICTIMS, "least-computed", "order", lambda self, candidates: 3),
}


@pytest.mark.parametrize(
    ("failure", "after"),
    # No trace needs victims more than five times.
    [(failure, after) for failure in FAILURES for after in (0, 5) if after == 0 or FAILURES[failure][3] != "order"],
)
def test_a_failing_policy_is_logged_once_and_replaced(failure, after, caplog):
    setting, kind, name, method, how = FAILURES[failure]
    num_replaced = 0
    for seed in (5, 6, 7):  # the first two traces need victims
        caplog.clear()
        policy = failing(kind.builtin[name], method, after, how)
        with caplog.at_level(logging.ERROR, logger="treadle"):
            Trace(seed, {"scheduler": "chunked", "order": "fcfs", setting: policy}).run()  # all requests are served
        assert len(caplog.records) <= 1
        for record in caplog.records:
            num_replaced += 1
            default = next(iter(kind.builtin))
            assert f"{kind.noun} 'Failing' failed" in record.getMessage()
            assert f"{default!r} replaces it" in record.getMessage()
    assert num_replaced == (2 if method == "order" else 3)


def test_ranks_are_recomputed_when_the_order_is_replaced(caplog):
    engine = ToyEngine(order=failing(ORDERS.builtin["shortest-first"], "key", 3, raises), max_num_seqs=1)
    for i, length in enumerate([9, 7, 5, 3]):
        engine.add(f"r{i}", [i] * length, 2)
    engine.run()
    starts = list(dict.fromkeys(s.request_id for s in engine.prefills()))
    assert starts == ["r0", "r1", "r2", "r3"]
    assert len(caplog.records) == 1


def test_errors_of_the_scheduler_are_not_attributed_to_the_policy(monkeypatch, caplog):
    def decodes(self):
        raise EngineError("a bug")

    monkeypatch.setattr(Phases, "decodes", decodes)
    engine = ToyEngine(scheduler=ReversedPhases)
    engine.add("a", [1])
    with pytest.raises(EngineError, match="a bug"):
        engine.step()
    assert not caplog.records


def test_request_views_are_read_only():
    seen = []

    class Modifying(QueueOrder):
        def key(self, request):
            with pytest.raises(AttributeError):
                request.priority = 5
            seen.append(request)
            return 0.0

        def admitted(self, request):
            assert request is seen[0]

    engine = ToyEngine(order=Modifying)
    engine.add("a", [1, 2, 3], 4, priority=2)
    engine.run()
    assert (seen[0].priority, seen[0].num_prompt_tokens, seen[0].num_output_tokens) == (2, 3, 4)


class Bookkeeper(QueueOrder):
    """Records the hook calls of each request."""

    books: dict

    def key(self, request):
        return 0.0

    def added(self, request):
        self.books[request.request_id] = ["added"]

    def admitted(self, request):
        self.books[request.request_id].append("admitted")

    def tokens(self, request, num_computed, num_generated):
        self.books[request.request_id].append((num_computed, num_generated))

    def ended(self, request):
        self.books[request.request_id].append("ended")


def test_hooks_report_the_events_of_a_request():
    Bookkeeper.books = {}
    engine = ToyEngine(order=Bookkeeper, max_num_batched_tokens=8)
    engine.add("a", [1] * 12, 3)
    engine.add("n", [2] * 4, 2, n=3)
    engine.run()
    engine.add("gone", [3], 5)
    engine.scheduler.abort("gone")
    books = Bookkeeper.books
    assert books["a"] == ["added", "admitted", (4, 0), (5, 0), (3, 1), (1, 1), (1, 1), "ended"]
    assert books["n"] == ["added", "admitted", (4, 3), (3, 3), "ended"]
    assert books["gone"] == ["added", "ended"]


def test_least_computed_is_preempted_first():
    engine = ToyEngine(
        num_blocks=9, block_size=4, max_model_len=36, admission_headroom=0, victim_policy="least-computed",
        max_num_batched_tokens=64,
    )  # fmt: skip
    engine.add("first", [1] * 8, 8)
    engine.add("short", [2] * 5, 12)
    engine.add("long", [3] * 18, 12)
    victims = []
    while engine.scheduler.num_unfinished_requests:
        victims += [p.request_id for p in engine.step().preempted]
    assert victims[0] == "short"
    assert engine.outputs("short") == [toy_continuation([2] * 5, 12)]
