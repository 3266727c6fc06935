"""Recordings: their content, their byte-for-byte reproducibility, and the reports made from them."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from support.recordings import record_run
from treadle import LLM, SamplingParams
from treadle.core.clock import SystemClock
from treadle.core.config import CacheConfig, SchedulerConfig
from treadle.core.errors import ConfigError, UsageError
from treadle.testing.toy import ToyEngine
from treadle.trace.recorder import StepRecorder
from treadle.trace.recording import Recording
from treadle.trace.step_table import StepTableObserver

TRACE = """
import sys
from pathlib import Path
from support.recordings import record_run
record_run(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "run.jsonl"


@pytest.fixture(scope="module")
def run(path):
    return record_run(path), Recording(path)


def test_recordings_are_the_same_to_the_byte_in_any_process(run, path, tmp_path):
    tests = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
        "PYTHONPATH": os.pathsep.join([tests, *sys.path]),
    }
    there = tmp_path / "there.jsonl"
    subprocess.run([sys.executable, "-c", TRACE, str(there)], check=True, env=environment, timeout=120)
    assert there.read_bytes() == path.read_bytes()
    assert path.stat().st_size > 10_000


def test_a_record_contains_what_each_request_did(run):
    engine, recording = run
    assert len(recording.records) == len(engine.plans)
    assert recording.requests() == [f"r{i}" for i in range(25)]
    assert recording.header["scheduler"]["order"] == "priority"
    for record, report in zip(recording.records, engine.reports, strict=True):
        assert record["step"] == report.plan.step
        assert record["tokens"] == report.plan.num_batched_tokens
        assert len(record["preempted"]) == len(report.preempted)
        blocks = record["blocks"]
        assert blocks["referenced"] + blocks["cached"] + blocks["free"] == 20
        assert record["duration"] == 1.0
    ended = {name: outcome for record in recording.records for name, outcome in record["finished"].items()}
    assert set(ended) == set(recording.requests())
    for name, request in engine.finished.items():
        assert ended[name]["output_tokens"] == sum(seq.num_output_tokens for seq in request.sequences)
        assert len(ended[name]["preemptions"]) == request.metrics.num_preemptions
    codes = {
        code for record in recording.records for queue in ("waiting", "swapped") for code in record[queue].values()
    }
    assert "no_free_blocks" in codes
    assert codes - {""} <= recording.header["wait_reasons"].keys()
    assert any(record["swaps_in"] for record in recording.records)
    assert any(record["copies"] for record in recording.records)


def test_the_history_of_a_request(run):
    engine, recording = run
    name = max(engine.finished.values(), key=lambda r: r.metrics.num_preemptions).request_id
    history = recording.history(name)
    assert history.startswith(f"Request {name}\n  arrived with ")
    assert "ended (length)" in history
    for p in engine.finished[name].metrics.preemptions:
        assert f"preempted in step {p.step} by {p.for_request_id} ({p.mode})" in history
    with pytest.raises(UsageError, match="there is no request 'nobody'; there are r0, r1"):
        recording.history("nobody")


def test_the_step_table(run):
    _, recording = run
    table = recording.table(1, 10)
    assert table.splitlines()[0].split()[:3] == ["step", "tokens", "r0"]
    whole = recording.table()
    for word in ("decode", "prefill", "beam", "swapped out by", "swapped in", "waiting: ", "→ end: length"):
        assert word in whole


def test_the_chrome_trace(run):
    engine, recording = run
    trace = json.loads(json.dumps(recording.chrome_trace()))
    events = trace["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert len(steps) == len(engine.plans)
    assert all(e["dur"] > 0 and "ts" in e for e in events if e["ph"] == "X")
    kinds = {e["cat"] for e in events if e["ph"] == "X" and e["tid"] > 0}
    assert kinds >= {"prefill", "re-prefill", "decode", "beam", "waiting", "swapped", "preempted"}
    waiting = {e["name"] for e in events if e.get("cat") == "waiting"}
    assert waiting >= {"waiting", "waiting: no free blocks"}
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {f"request r{i}" for i in range(25)}
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"blocks", "queues", "tokens"}


def test_errors_for_invalid_recordings_name_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(UsageError, match="cannot be read"):
        Recording(path)
    path.write_text("{}\n")
    with pytest.raises(UsageError, match="is not a recording"):
        Recording(path)
    path.write_text('{"treadle_recording": 1}\n')
    with pytest.raises(UsageError, match="of format 1, but this version reads format 2"):
        Recording(path)
    path.write_text('{"treadle_recording": 2}\n{"st\n{}\n')
    with pytest.raises(UsageError, match="line 2: not JSON"):
        Recording(path)


def test_a_recording_cut_off_in_its_last_line_can_be_read(tmp_path):
    path = tmp_path / "run.jsonl"
    record_run(path)
    whole = Recording(path).records
    path.write_bytes(path.read_bytes()[:-30])
    assert Recording(path).records == whole[:-1]


def test_an_unwritable_recording_file_is_refused(tmp_path):
    path, cache_config = tmp_path / "no" / "run.jsonl", CacheConfig(num_blocks=1)
    with pytest.raises(ConfigError, match="record: .* cannot be written"):
        StepRecorder(path, SchedulerConfig(max_model_len=16), cache_config, SystemClock())


def test_a_full_disk_at_the_start(tiny):
    with pytest.raises(ConfigError, match="record: /dev/full cannot be written .*No space left.*with free space"):
        LLM(str(tiny.folder), num_kv_blocks=8, max_model_len=64, swap_space=0, record="/dev/full")


def test_a_disk_that_fills_ends_the_recording_and_nothing_else(tiny, tmp_path, caplog):
    llm = LLM(
        str(tiny.folder), num_kv_blocks=8, max_model_len=64, swap_space=0, log_stats_interval_s=0,
        record=str(tmp_path / "run.jsonl"),
    )  # fmt: skip
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    size = (tmp_path / "run.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 600, limits[1]))
    try:
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(output.outputs[0].token_ids) == 4
    (warning,) = [record.getMessage() for record in caplog.records if "recording" in record.getMessage()]
    assert "recording has ended" in warning
    assert "run.jsonl cannot be written" in warning
    records = Recording(tmp_path / "run.jsonl").records
    assert 0 < len(records) < 4
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert Recording(tmp_path / "run.jsonl").records == records


def test_requests_that_end_between_steps_are_recorded_with_the_next_step(tmp_path):
    path = tmp_path / "run.jsonl"
    engine = ToyEngine()
    scheduler = engine.scheduler
    recorder = StepRecorder(path, scheduler.config, scheduler.cache_config, engine.clock)
    steps = StepTableObserver(scheduler.cache_config.num_blocks, engine.clock)
    engine.observers += [recorder, steps]
    for name in ("a", "b"):
        engine.add(name, [1, 2, 3], 4)
    engine.step()
    scheduler.abort("b")
    ended = engine.collect()
    assert [request.request_id for request in ended] == ["b"]
    for observer in engine.observers:  # as the engine does between two steps
        observer.on_step(None, None, ended)
    engine.run()
    recorder.close()
    table = steps.table.render()
    assert Recording(path).table() == table
    assert "end: abort" in table.splitlines()[3]
