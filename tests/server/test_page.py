"""The page in a real browser, with real requests running: Debian's Chromium, driven by Playwright."""

import json
import os
import re
import shutil

import httpx2
import pytest
from playwright.sync_api import expect, sync_playwright

from server.conftest import PATIENCE_S, running
from support.block_maps import apply
from support.recordings import record_run
from treadle.cli.main import main
from treadle.trace.recording import Recording

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_S * 1000)

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NAUGHTY = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser():
    chromium = os.environ.get("TREADLE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("needs Chromium (apt-get install chromium), or TREADLE_CHROMIUM=/path/to/it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens pages, which must not log errors."""
    contexts, complaints = [], []

    def on_message(message):
        # The browser logs every response other than 200; tests check those themselves.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            complaints.append(message.text)

    def open_page(url, **options):
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 1100}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", on_message)
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def small_server():
    """A pool too small for a few conversations at once."""
    with running(num_kv_blocks=26, max_model_len=400, max_num_batched_tokens=64, admission_headroom=0) as server:
        yield server


def ask(page, text, *, copies="1", tokens="60"):
    page.fill("#chat textarea", text)
    page.fill("#chat input[name=tokens]", tokens)
    page.select_option("#chat select", copies)
    page.get_by_role("button", name="Send").click()


def test_queues_move_and_a_preemption_is_explained(small_server, open_page):
    page = open_page(small_server.url)
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#empty")).to_be_visible()
    ask(page, "Tell me about the sea.", copies="16", tokens="90")
    count = {queue: page.locator(f"#{queue} .count") for queue in ("running", "waiting", "swapped")}
    expect(count["running"]).not_to_have_text("0")
    expect(count["waiting"]).not_to_have_text("0")
    preempted = page.locator("#events li.k-preempted").first
    expect(preempted).to_contain_text("is preempted: it gives up its blocks")
    answer = page.locator("#chat-log .assistant")
    expect(answer).not_to_be_empty()
    # All requests finish, and the queues are empty again.
    expect(count["waiting"]).to_have_text("0")
    small_server.wait_until_idle()
    # Back to the step of the preemption: which request, and for which.
    preempted.get_by_role("button").click()
    expect(page.get_by_role("button", name="▶ Live")).to_be_visible()
    step = re.search(r"step (\d+)", preempted.inner_text())[1]
    expect(page.locator("#where")).to_contain_text(f"step {step} (")
    words = page.locator("#step-words li.k-preempted").first
    expect(words).to_contain_text(
        re.compile(r"because page-\S+ needed a block, none was free, and this one ranks last")
    )
    expect(page.locator("#history li.k-preempted").last).to_contain_text("is preempted")
    expect(page.locator("#waiting .card.followed .why")).to_contain_text("is preempted")
    # The tooltip of the timeline says the same.
    note = page.locator("#note")
    box = page.locator("#timeline").bounding_box()
    x = _column(page, int(step))
    notes = []
    for y in range(20, int(box["height"]), 8):
        page.mouse.move(box["x"] + x, box["y"] + y)
        notes.append(note.inner_text() if note.is_visible() else "")
    assert any(text.startswith(f"Step {step}") and "is preempted" in text for text in notes), notes
    # One step back, and forward again.
    page.get_by_role("button", name="One step back").click()
    expect(page.locator("#where")).to_contain_text(f"step {int(step) - 1} (")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#where")).to_contain_text(f"step {step} (")
    page.locator("#toggle").click()
    expect(page.locator("#where")).not_to_contain_text("available")


def _column(page, step):
    """The x coordinate of the current step in the timeline, which leaves a third of its width for later steps."""
    last = int(page.locator("#slider").get_attribute("max")) + 1
    shown = int((page.locator("#timeline").bounding_box()["width"] - 130) // 9)
    first = max(0, min(last, step - 1 - (-shown // 3)) - shown)
    return 130 + 9 * (step - 1 - first) + 4


def test_the_chat_box_continues_its_conversation(small_server, open_page):
    page = open_page(small_server.url)
    ask(page, "My name is Ada.", tokens="20")
    answers = page.locator("#chat-log .assistant")
    small_server.wait_until_idle()
    expect(answers).to_have_count(1)
    expect(answers.first).not_to_be_empty()
    expect(page.locator("#history-name")).to_contain_text("chatcmpl-page-")
    ask(page, "What is it?", tokens="20")
    expect(answers).to_have_count(2)
    expect(answers.nth(1)).not_to_be_empty()
    ask(page, "?", tokens="4000")  # more than the model's length: shows the server's message
    expect(page.locator("#chat-log .error")).to_contain_text("max_tokens")
    page.get_by_role("button", name="New").click()
    expect(answers).to_have_count(0)


def test_the_page_asks_for_the_key(open_page):
    with running(app_options={"api_key": "secret"}) as server:
        for path in ("/scheduler/steps", "/scheduler/state", "/v1/models", "/metrics"):
            assert httpx2.get(server.url + path).status_code == 401
        page = open_page(server.url)
        dialog = page.locator("#ask-key")
        expect(dialog).to_be_visible()
        for key in ("wrong", "secret"):
            dialog.locator("input").fill(key)
            dialog.get_by_role("button").click()
            expect(dialog).to_be_visible() if key == "wrong" else expect(dialog).not_to_be_visible()
        expect(page.locator("#status")).to_have_text("live")
        expect(page.locator("#model")).to_have_text("tiny")
        ask(page, "Hello", tokens="4")
        expect(page.locator("#chat-log .assistant")).not_to_be_empty()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(small_server, open_page, scheme):
    page = open_page(small_server.url, viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    ask(page, "Hello", copies="4", tokens="10")
    expect(page.locator("#events li").first).to_be_visible()
    small_server.wait_until_idle()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper))
    assert (ink > paper) == (scheme == "dark")
    assert abs(ink - paper) > 450


def test_names_are_only_text(small_server, open_page, tmp_path):
    page = open_page(small_server.url)
    expect(page.locator("#status")).to_have_text("live")
    body = {"prompt": "Hello", "max_tokens": 3, "request_id": NAUGHTY}
    assert small_server.post("/v1/completions", body).status_code == 200
    expect(page.locator("#events li").first).to_contain_text("<img")
    # The same id again is a new request.
    assert small_server.post("/v1/completions", body).status_code == 200
    expect(page.locator("#events li", has_text="arrives with")).to_have_count(2)
    expect(page.locator("#events li", has_text="It finishes in this step")).to_have_count(2)
    page.goto(f"{small_server.url}/page/..%2f..%2fapp.py")
    assert "there is no" in page.content()


def test_a_recording_opens_without_a_server(open_page, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    record_run(path)
    # Numeric ids, as LLM assigns them, and one that contains markup.
    path.write_text(re.sub(r'"r(\d+)"', r'"\1"', path.read_text()).replace('"1"', json.dumps(NAUGHTY)))
    assert main(["explain", "--web", str(path), "--output", str(tmp_path / "it.html")]) == 0
    assert "it.html" in capsys.readouterr().out
    recording = Recording(path)
    page = open_page((tmp_path / "it.html").as_uri(), offline=True)
    expect(page.locator("#status")).to_have_text(f"recording of {len(recording.records)} steps")
    expect(page.locator("#ask")).not_to_be_visible()
    for record in recording.records[::9]:
        page.locator("#slider").fill(str(record["step"] - 1))
        expect(page.locator("#where")).to_contain_text(f"step {record['step']} (")
        gone = {p["request"] for p in record["preempted"] if p["mode"] == "recompute"}
        expect(page.locator("#waiting .count")).to_have_text(str(len(gone | set(record["waiting"]))))
        if not gone:
            cards = page.locator("#waiting .card").evaluate_all("cards => cards.map((card) => card.dataset.request)")
            assert cards == list(record["waiting"])  # in queue order
        blocks = record["blocks"]
        expect(page.locator("#blocks-caption")).to_contain_text(
            f"{blocks['referenced']} held · {blocks['cached']} cached · {blocks['free']} free"
        )
    page.locator("#slider").fill("0")
    page.select_option("#speed", "20")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#where")).to_contain_text(f"step {len(recording.records)} (")


def test_the_page_and_the_recording_agree(small_server, open_page, tmp_path):
    """Compares every step's queues and blocks, forwards and backwards, with the recording as Python reads it."""
    path = tmp_path / "run.jsonl"
    record_run(path)
    recording = Recording(path)
    page = open_page(small_server.url)
    views = page.evaluate(
        """async ([header, records]) => {
            const { Run, BlockMap } = await import("./page/run.js");
            const run = new Run();
            run.beginRecording(header);
            records.forEach((record) => run.add(record));
            const view = (i) => {
                run.blocks.seek(i + 1);
                const queues = run.queuesAt(run.steps[i]);
                const holders = Array.from(run.blocks.holders, (holder) =>
                    holder < 0 ? holder : [BlockMap.isShared(holder), run.byNumber[BlockMap.number(holder)].id]);
                const names = (queue) => queues[queue].map((entry) => entry.request.id);
                return { holders, running: names("running"), waiting: names("waiting"), swapped: names("swapped") };
            };
            const there = run.steps.map((_, i) => view(i));
            const back = run.steps.map((_, i) => view(run.steps.length - 1 - i)).reverse();
            return [there, back, run.events, run.steps.map((step) => [step.itl, step.longestItl])];
        }""",
        [recording.header, recording.records],
    )
    there, back, events, latencies = views
    assert there == back
    blocks = dict.fromkeys(range(recording.header["num_blocks"]), "free")
    for record, view in zip(recording.records, there, strict=True):
        apply(blocks, record["block_changes"])
        names = {-2: "free", -1: "cached"}
        holders = [names[h] if isinstance(h, int) else ("shared" if h[0] else "held", h[1]) for h in view["holders"]]
        assert holders == list(blocks.values())
        gone = {
            mode: {p["request"] for p in record["preempted"] if p["mode"] == mode} for mode in ("recompute", "swap")
        }
        assert set(view["waiting"]) == set(record["waiting"]) | gone["recompute"]
        assert set(view["swapped"]) == set(record["swapped"]) | gone["swap"]
        assert set(view["running"]) == (set(record["ran"]) | set(record["idle"])) - gone["recompute"] - gone["swap"]
    told = sum(event["kind"] in ("preempted", "swapped-out") for event in events)
    assert told == sum(len(record["preempted"]) for record in recording.records) > 0
    ends = [record["time"] + record["duration"] for record in recording.records]
    only_decodes = [{part["kind"] for part in record["ran"].values()} == {"decode"} for record in recording.records]
    steady = 0
    for i, (record, before) in enumerate(zip(recording.records[1:], recording.records, strict=False), 1):
        if only_decodes[i] and set(record["ran"]) <= set(before["ran"]) and only_decodes[i - 1]:
            assert latencies[i] == [pytest.approx(ends[i] - ends[i - 1])] * 2
            steady += 1
    assert steady
    assert any(longest is not None and longest > 3 * middle for middle, longest in latencies)  # resumed after waiting


def test_a_long_run_drops_old_steps(small_server, open_page, tmp_path):
    path = tmp_path / "run.jsonl"
    record_run(path)
    recording = Recording(path)
    page = open_page(small_server.url)
    whole, cut = page.evaluate(
        """async ([header, records]) => {
            const { Run } = await import("./page/run.js");
            return [Infinity, 20].map((limit) => {
                const run = new Run();
                run.beginRecording(header);
                run.limit = limit;
                records.forEach((record) => run.add(record));
                return run.steps.slice(-15).map((step, i) => {
                    run.blocks.seek(run.steps.length - 15 + i + 1);
                    const queues = run.queuesAt(step);
                    return [step.number, Array.from(run.blocks.holders), Object.values(queues).map((entries) =>
                        entries.map((e) => [e.request.id, e.computed, e.outputs]))];
                });
            });
        }""",
        [recording.header, recording.records],
    )
    assert whole == cut
