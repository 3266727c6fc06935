"""Queue orders: rank, displacement, requests that are passed over, and ageing."""

import sys
from pathlib import Path

import pytest

from support.examples import share
from treadle.core.errors import ConfigError, InvalidRequestError, Overloaded
from treadle.core.lora import LoRARequest
from treadle.scheduler import WaitReason
from treadle.testing import check_policy
from treadle.testing.toy import ToyEngine, toy_continuation

B = 4
POLICIES = ["chunked", "three-phase", "prefill-first", "phased"]
ORDERS = ["fcfs", "priority", "shortest-first", "fair", "deadline", "least-slack", "cache-aware"]


def order_of_starts(engine):
    return list(dict.fromkeys(s.request_id for s in engine.prefills()))


def test_lower_priority_values_go_first_and_equal_ones_in_order_of_arrival():
    engine = ToyEngine(order="priority", max_num_seqs=1, max_num_batched_tokens=8)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -5)]:
        engine.add(name, [1, 2], 3, priority=priority)
    engine.run()
    assert order_of_starts(engine) == ["d", "b", "a", "c"]


def test_shortest_first_orders_by_prompt_length():
    engine = ToyEngine(order="shortest-first", max_num_seqs=1)
    for name, length in [("long", 20), ("short", 2), ("middle", 9)]:
        engine.add(name, list(range(length)), 3)
    engine.run()
    assert order_of_starts(engine) == ["short", "middle", "long"]


def test_deadline_orders_by_the_earliest_deadline():
    engine = ToyEngine(order="deadline", max_num_seqs=1)
    for name, deadline in [("never", float("inf")), ("late", 90.0), ("soon", 5.0)]:
        engine.add(name, [1, 2], 3, deadline=deadline)
    engine.run()
    assert order_of_starts(engine) == ["soon", "late", "never"]


def test_fair_lets_tenants_take_turns_regardless_of_their_load():
    engine = ToyEngine(order="fair", max_num_seqs=1)
    for i in range(8):
        engine.add(f"greedy {i}", [1, 2], 8, tenant="greedy")
    for i in range(3):
        engine.add(f"modest {i}", [1, 2], 8, tenant="modest")
    engine.run()
    starts = order_of_starts(engine)
    assert max(starts.index(f"modest {i}") for i in range(3)) <= 6
    assert starts.index("modest 0") <= 1


def test_fair_gives_no_credit_to_an_idle_tenant():
    engine = ToyEngine(order="fair", max_num_seqs=1)
    for i in range(6):
        engine.add(f"early {i}", [1, 2], 4, tenant="early")
    for _ in range(12):
        engine.step()
    for i in range(6):
        engine.add(f"late {i}", [1, 2], 4, tenant="late")
    engine.run()
    starts = order_of_starts(engine)
    # The late tenant takes turns from now on; it does not run all of its requests first.
    assert starts.index("early 5") < starts.index("late 5")


def test_fair_charges_requests_without_max_tokens_for_the_longest_output():
    """One tenant gives max_tokens; the output of the other tenant is limited by the model length only."""
    engine = ToyEngine(order="fair", max_num_seqs=1, max_model_len=112, age_limit_s=None)
    for i in range(4):
        engine.add(f"open {i}", [1, 2], None, tenant="open")
        engine.add(f"bound {i}", [1, 2], 20, tenant="bound")
    engine.run()
    starts = order_of_starts(engine)
    assert starts[:2] == ["open 0", "bound 0"]
    # One request of 112 tokens weighs as much as five requests of 22 tokens.
    assert starts.index("open 1") > starts.index("bound 3")


def test_fair_refunds_unused_tokens():
    """Requests without a limit end early, and their tenant gets as many turns as the other one."""
    stop_ids = range(25)  # every second token
    engine = ToyEngine(order="fair", max_num_seqs=1, max_model_len=112, age_limit_s=None)
    for i in range(6):
        engine.add(f"open {i}", [1, i], None, stop_ids, tenant="open")
        engine.add(f"bound {i}", [1, i], 4, tenant="bound")
    engine.run()
    used = sum(len(engine.outputs(f"open {i}")[0]) for i in range(6))
    assert used < 30
    starts = order_of_starts(engine)
    for i in range(1, 6):
        assert abs(starts.index(f"open {i}") - starts.index(f"bound {i}")) <= 5
    assert starts.index("open 3") < starts.index("bound 5")


def test_fair_refunds_aborted_requests():
    engine = ToyEngine(order="fair", max_num_seqs=1)
    engine.add("running", [1], 3, tenant="x")
    engine.step()
    for i in range(5):
        engine.add(f"gone {i}", [1, 2], 50, tenant="y")
    engine.add("stays", [1, 2], 5, tenant="y")
    engine.add("other", [1, 2], 5, tenant="z")
    engine.add("other again", [1, 2], 5, tenant="z")
    for i in range(5):
        engine.scheduler.abort(f"gone {i}")
    engine.collect()
    engine.run()
    starts = order_of_starts(engine)
    assert starts.index("stays") < starts.index("other again")


def test_cache_aware_orders_by_the_longest_cached_prefix():
    engine = ToyEngine(order="cache-aware", max_num_seqs=1, num_blocks=64, block_size=B)
    beginning = list(range(30, 46))
    engine.add("first", [*beginning, 1], 1)
    engine.run()
    engine.add("runs", [7], 6)
    engine.step()
    engine.add("nothing", [5] * 20, 2)
    engine.add("half", [*beginning[:8], 5, 6, 7, 8, 9], 2)
    engine.add("all", [*beginning, 2, 3], 2)
    engine.run()
    assert order_of_starts(engine)[2:] == ["all", "half", "nothing"]


def test_cache_aware_recomputes_keys_when_the_cache_has_changed():
    engine = ToyEngine(order="cache-aware", max_num_seqs=1, num_blocks=64, block_size=B)
    engine.add("first", [5] * 12, 8)
    engine.add("nothing", [6] * 12, 2)
    engine.add("like the first", [*[5] * 12, 1], 2)
    engine.run()
    assert order_of_starts(engine) == ["first", "like the first", "nothing"]


def test_least_slack_accounts_for_the_remaining_work():
    """The request with the later deadline has less slack, given the measured duration of a step."""
    engine = ToyEngine(order="least-slack", max_num_seqs=1, num_blocks=200, max_num_batched_tokens=10)
    for i in range(3):
        engine.add(f"warm-up {i}", [i], 20)
    engine.run()
    now = engine.clock.now()
    engine.add("runs", [1], 5)
    engine.step()
    engine.add("short", [2], 2, deadline=now + 60)
    engine.add("long", [3] * 300, 20, deadline=now + 75)
    engine.add("whenever", [4], 2)
    engine.run()
    assert order_of_starts(engine)[-3:] == ["long", "short", "whenever"]
    for name in ("short", "long"):
        request = engine.finished[name]
        assert request.metrics.finished_time <= request.deadline


def test_a_better_priority_displaces_five_requests_in_one_step():
    engine = ToyEngine(num_blocks=20, block_size=B, order="priority", max_model_len=76, max_num_seqs=8)
    for i in range(5):
        engine.add(f"low {i}", [i] * 11, 30, priority=5)
    for _ in range(6):
        engine.step()
    assert len(engine.scheduler.batch) == 5
    engine.add("high", list(range(50)) + list(range(20)), 6, priority=0)
    report = engine.step()
    assert [p.request_id for p in report.preempted] == [f"low {i}" for i in (4, 3, 2, 1, 0)]
    assert {p.for_request_id for p in report.preempted} == {"high"}
    assert [s.request_id for s in engine.prefills(report)][:1] == ["high"]
    engine.run()
    assert engine.outputs("high") == [toy_continuation([*range(50), *range(20)], 6)]
    for i in range(5):
        assert engine.outputs(f"low {i}") == [toy_continuation([i] * 11, 30)]


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_priorities_never_displace_each_other(policy):
    engine = ToyEngine(
        num_blocks=12, block_size=B, order="priority", max_model_len=40, scheduler=policy, max_num_seqs=2
    )
    for i in range(12):
        engine.add(f"r{i}", [i] * 9, 8, priority=3)
        engine.step()
    engine.run()
    # Requests are only preempted for the decode of a request ahead of them, never for a waiting request.
    for report in engine.reports:
        assert all(int(p.request_id[1:]) >= int(p.for_request_id[1:]) for p in report.preempted)


def test_only_the_priority_order_displaces():
    engine = ToyEngine(num_blocks=8, block_size=B, max_model_len=32)
    engine.add("low", [1] * 20, 10, priority=9)
    engine.step()
    engine.add("high", [2] * 20, 5, priority=0)
    engine.run()
    assert not any(report.preempted for report in engine.reports)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_starves_under_endless_arrivals(policy, order):
    """The victim is last in every order; the age limit bounds its waiting time."""
    engine = ToyEngine(
        num_blocks=24, block_size=B, max_model_len=60, max_num_seqs=3, scheduler=policy, order=order, age_limit_s=30.0,
        num_host_blocks=20,
    )  # fmt: skip
    victim = {"priority": 9, "tenant": "busy"}
    for i in range(3):
        engine.add(f"first {i}", [3] * 4, 10, priority=9, tenant="busy")
    engine.add("victim", list(range(40)), 12, **victim)
    for i in range(600):
        if "victim" in engine.finished:
            break
        engine.add(f"new {i}", [i % 50] * 3, 4, priority=0, tenant="busy" if i % 2 else "other", deadline=i + 5.0)
        engine.step()
    metrics = engine.finished["victim"].metrics
    assert engine.outputs("victim") == [toy_continuation(range(40), 12)]
    # An aged request goes next, and the running requests end within the longest output and a few steps.
    assert metrics.first_scheduled_time <= 30.0 + 60.0
    assert metrics.num_preemptions <= 3


@pytest.mark.parametrize("policy", POLICIES)
def test_the_number_of_preemptions_of_a_request_is_bounded(policy):
    engine = ToyEngine(num_blocks=14, block_size=B, max_model_len=48, max_num_seqs=6, scheduler=policy)
    for i in range(30):
        engine.add(f"r{i}", [i] * (3 + i % 11), 20)
        engine.step()
    engine.run()
    # A request that was preempted n times needs 2^n times the headroom to be admitted again.
    assert max(r.metrics.num_preemptions for r in engine.finished.values()) <= 5


def lora(number, version=0):
    return LoRARequest(f"adapter {number}", number, version=version)


def test_requests_over_the_adapter_cap_are_passed_over_and_keep_their_place():
    engine = ToyEngine(max_loras=1, max_num_seqs=4)
    engine.add("one", [1, 2], 10, lora=lora(1))
    engine.add("two", [1, 2], 5, lora=lora(2))
    engine.add("base", [1, 2], 5)
    engine.add("one again", [1, 2], 5, lora=lora(1))
    report = engine.step()
    assert [s.request_id for s in engine.prefills(report)] == ["one", "base", "one again"]
    assert [(r.request_id, r.reason) for r in report.refusals] == [("two", WaitReason.TOO_MANY_ADAPTERS)]
    engine.run()
    assert order_of_starts(engine)[-1] == "two"
    for name, adapter, count in [("one", 1, 10), ("two", 2, 5), ("base", 0, 5), ("one again", 1, 5)]:
        assert engine.outputs(name) == [toy_continuation([1, 2], count, adapter=adapter)]


def test_a_stream_of_one_adapter_does_not_starve_another_adapter():
    engine = ToyEngine(max_loras=1, max_num_seqs=3, age_limit_s=20.0)
    engine.add("first", [1], 6, lora=lora(1))
    engine.add("victim", [2], 6, lora=lora(2))
    for i in range(300):
        if "victim" in engine.finished:
            break
        engine.add(f"stream {i}", [3, i % 50], 4 + i % 5, lora=lora(1))
        engine.step()
    metrics = engine.finished["victim"].metrics
    assert 20.0 <= metrics.first_scheduled_time <= 30.0


def test_the_adapter_cap_does_not_delay_base_model_requests():
    engine = ToyEngine(max_loras=1, max_num_seqs=3)
    engine.add("one", [1], 20, lora=lora(1))
    engine.add("two", [1], 5, lora=lora(2))
    engine.add("base", [1], 5)
    engine.step()
    assert {seq.request.request_id for seq in engine.scheduler.batch.running_sequences()} == {"one", "base"}


def test_cached_prefixes_are_separate_for_each_adapter_version_and_salt():
    engine = ToyEngine(max_loras=2)
    prompt = list(range(17))
    kinds = [
        {},
        {"lora": lora(1)},
        {"lora": lora(1, version=1)},
        {"lora": lora(2)},
        {"cache_salt": "x"},
        {"lora": lora(1), "cache_salt": "x"},
    ]
    for turn in range(2):
        for i, kind in enumerate(kinds):
            engine.add(f"{i} {turn}", prompt, 2, **kind)
            engine.run()
            cached = engine.finished[f"{i} {turn}"].metrics.num_cached_tokens
            assert cached == (16 if turn else 0)


def test_adapter_requests_are_refused_if_adapters_are_disabled():
    engine = ToyEngine(max_loras=0)
    with pytest.raises(InvalidRequestError, match=r"adapter 'adapter 1': adapters are disabled"):
        engine.add("a", [1], lora=lora(1))


def test_the_error_for_a_full_queue_contains_the_counts():
    engine = ToyEngine(max_num_queued_requests=3, max_num_queued_tokens=20, max_num_seqs=1)
    for name in "abc":
        engine.add(name, [1] * 5)
    with pytest.raises(Overloaded, match="3 requests are waiting and the limit is 3") as caught:
        engine.add("d", [1])
    assert (caught.value.num_queued_requests, caught.value.num_queued_tokens) == (3, 15)
    engine.step()
    with pytest.raises(Overloaded, match="10 prompt tokens are waiting and the limit is 20"):
        engine.add("d", [1] * 11)
    engine.add("d", [1] * 10)
    engine.run()
    assert set(engine.finished) == set("abcd")


def test_the_error_for_an_unknown_order_lists_the_known_ones():
    with pytest.raises(ConfigError, match="order: unknown order 'best'; known: cache-aware, deadline, fair, fcfs"):
        ToyEngine(order="best")


def example_of_the_docs(name):
    docs = (Path(__file__).parents[2] / "docs" / "scheduler.md").read_text()
    return docs.split(f"```python\n# {name}\n")[1].split("```")[0]


def test_a_policy_of_another_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    """This installs the example of docs/scheduler.md as a package with an entry point."""
    (tmp_path / "least_served.py").write_text(example_of_the_docs("least_served.py"))
    info = tmp_path / "least_served-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: least-served\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[treadle.policies]\nleast-served = least_served:LeastServed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        engine = ToyEngine(order="least-served", max_num_seqs=1)
        for name, tenant in [("x 0", "x"), ("x 1", "x"), ("x 2", "x"), ("y 0", "y"), ("y 1", "y")]:
            engine.add(name, [1, 2], 3, tenant=tenant)
        engine.run()
        assert order_of_starts(engine) == ["x 0", "y 0", "x 1", "y 1", "x 2"]
        with pytest.raises(ConfigError, match="unknown order 'x'; known: .*least-served"):
            ToyEngine(order="x")
        with pytest.raises(ConfigError, match=r"'least-served' has no method run\(\)"):
            ToyEngine(scheduler="least-served")
    finally:
        sys.modules.pop("least_served", None)


def test_the_documented_examples_pass_check_policy():
    for name, policy in [("least_served.py", "LeastServed"), ("decodes_when_busy.py", "DecodesWhenBusy")]:
        namespace = {}
        exec(example_of_the_docs(name), namespace)
        check_policy(namespace[policy], num_traces=share(6, at_least=3))
