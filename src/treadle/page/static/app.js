// The page: connects the views, and navigates through the steps.

import { BlockView } from "./blocks.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Queues } from "./queues.js";
import { Run, median, shortName } from "./run.js";
import { call, followServer, loadRecording, recording } from "./source.js";
import { Timeline } from "./timeline.js";

const REDRAW_MS = 100;
const EVENTS_SHOWN = 60;

const at = (id) => document.getElementById(id);
const run = new Run();
let cursor = -1; // index of the displayed step
let isLive = !recording;
let isPlaying = false;
let followed = null; // number of the followed request
let wanted = null; // id of a request to follow as soon as it appears
let isDue = false;

const timeline = new Timeline(at("timeline"), (step, row) => {
  pause();
  cursor = run.indexOf(step);
  if (row !== null) follow(row);
  redraw();
});
const blocks = new BlockView(at("blocks"), at("blocks-caption"), follow);
const queues = new Queues({ running: at("running"), waiting: at("waiting"), swapped: at("swapped") }, follow);
const charts = new Charts({ tokens: at("chart-tokens"), latency: at("chart-latency"), pool: at("chart-pool") });

// Navigation

function pause() {
  isLive = isPlaying = false;
}

function go(index) {
  pause();
  cursor = Math.max(0, Math.min(run.steps.length - 1, index));
  redraw();
}

function toggle() {
  if (recording) {
    isPlaying = !isPlaying;
    if (isPlaying && cursor >= run.steps.length - 1) cursor = 0;
    if (isPlaying) play();
  } else {
    isLive = !isLive;
  }
  redraw();
}

function play() {
  if (!isPlaying) return;
  if (cursor >= run.steps.length - 1) isPlaying = false;
  else {
    cursor++;
    setTimeout(play, Number(at("speed").value));
  }
  redraw();
}

function follow(number) {
  followed = number;
  redraw();
}

function onStep() {
  if (wanted !== null && run.requests.has(wanted)) {
    followed = run.requests.get(wanted).number;
    wanted = null;
  }
  redraw();
}

// Drawing

function redraw() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => requestAnimationFrame(draw), isLive ? REDRAW_MS : 0);
}

let numDropped = 0;

function draw() {
  isDue = false;
  if (run.numDropped !== numDropped) {
    // Old steps were dropped: keep showing the same step.
    if (!isLive) cursor = Math.max(0, cursor - (run.numDropped - numDropped));
    numDropped = run.numDropped;
  }
  if (isLive || cursor >= run.steps.length) cursor = run.steps.length - 1;
  if (followed !== null && !run.byNumber[followed]) followed = null;
  const step = run.steps[cursor];
  at("toggle").textContent = recording ? (isPlaying ? "❚❚ Pause" : "▶ Play") : isLive ? "❚❚ Pause" : "▶ Live";
  at("toggle").setAttribute("aria-pressed", String(!isLive));
  at("empty").hidden = Boolean(step) || Boolean(recording);
  queues.draw(run, step, followed);
  if (!step) return;
  const slider = at("slider");
  slider.max = run.steps.length - 1;
  slider.value = cursor;
  const [first, last] = [run.steps[0].number, run.steps.at(-1).number];
  at("where").textContent = `step ${step.number}` + (isLive ? "" : ` (${first} to ${last} available)`);
  drawFigures(step);
  timeline.draw(run, cursor, followed);
  blocks.draw(run, cursor, followed);
  charts.draw(run, cursor);
  drawWords(step);
  drawEvents(step);
  drawHistory(step);
}

function drawFigures(step) {
  const recent = run.steps.slice(Math.max(0, cursor - 99), cursor + 1);
  const ms = (seconds) => (seconds === undefined ? "–" : seconds < 10 ? `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`);
  const seconds = recent.at(-1).time + recent.at(-1).duration - recent[0].time;
  const total = recent.reduce((sum, s) => sum + s.tokens, 0);
  const share = step.blocks.referenced / (run.numBlocks || 1);
  const figures = {
    "tokens/step": step.tokens,
    "tokens/s": seconds > 0 ? Math.round(total / seconds).toLocaleString("en") : "–",
    "KV held": `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`,
    TTFT: ms(median(run.steps.slice(0, cursor + 1).flatMap((s) => s.ttfts).slice(-20))),
    ITL: ms(median(recent.filter((s) => s.itl !== null).map((s) => s.itl))),
  };
  at("figures").replaceChildren(
    ...Object.entries(figures).map(([name, value]) => {
      const item = document.createElement("div");
      const strong = document.createElement("b");
      strong.textContent = value;
      item.append(strong, ` ${name}`);
      return item;
    }),
  );
}

function line(kind, head, text, onClick) {
  const item = document.createElement("li");
  item.className = `k-${kind}`;
  const button = document.createElement("button");
  button.textContent = head;
  button.addEventListener("click", onClick);
  item.append(button, ` ${text}`);
  return item;
}

function drawWords(step) {
  const cells = [...run.cellsOf(step)].filter(([number]) => run.byNumber[number]);
  const order = ["preempted", "swapped-out", "prefill", "chunk", "re-prefill", "decode", "beam", "idle", "swapped", "waiting"];
  cells.sort(([a, x], [b, y]) => order.indexOf(x.kind) - order.indexOf(y.kind) || a - b);
  at("step-title").textContent =
    `Step ${step.number}: ${step.tokens} tokens in ${(step.duration * 1000).toFixed(1)} ms`;
  at("step-words").replaceChildren(
    ...cells.slice(0, 30).map(([number, cell]) =>
      line(cell.kind, shortName(run.byNumber[number].id), run.explain(step, number, cell), () => follow(number)),
    ),
  );
}

function drawEvents(step) {
  const events = run.events.filter((event) => event.step <= step.number).slice(-EVENTS_SHOWN).reverse();
  at("events").replaceChildren(
    ...events.map((event) => {
      const name = event.number < 0 ? "" : shortName(run.byNumber[event.number]?.id ?? "");
      return line(event.kind, `step ${event.step}`, `${name} ${event.text}`, () => {
        if (event.number >= 0) followed = event.number;
        go(run.indexOf(event.step));
      });
    }),
  );
}

function drawHistory(step) {
  at("history-panel").hidden = followed === null;
  if (followed === null) return;
  const request = run.byNumber[followed];
  at("history-name").textContent = request.id;
  const lines = run.history(request, step.number);
  at("history").replaceChildren(
    ...lines.slice(-40).map((l) =>
      line(l.kind, l.first === l.last ? `step ${l.first}` : `steps ${l.first}–${l.last}`, l.text, () => go(run.indexOf(l.first))),
    ),
  );
}

// Wiring

at("toggle").addEventListener("click", toggle);
at("back").addEventListener("click", () => go(cursor - 1));
at("forward").addEventListener("click", () => go(cursor + 1));
at("slider").addEventListener("input", (event) => go(Number(event.target.value)));
at("unfollow").addEventListener("click", () => follow(null));
at("find").addEventListener("change", (event) => {
  const text = event.target.value.trim();
  const request = [...run.requests.values()].findLast((r) => r.id === text || shortName(r.id) === text || (text && r.id.includes(text)));
  event.target.setCustomValidity(request || !text ? "" : "The available steps contain no such request.");
  event.target.reportValidity();
  follow(request ? request.number : null);
});
window.addEventListener("resize", redraw);
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, dialog")) return;
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };
  if (event.key in moves) go(cursor + moves[event.key]);
  else if (event.key === "Home") go(0);
  else if (event.key === "End" && recording) go(run.steps.length - 1);
  else if (event.key === "End") isLive = true;
  else if (event.key === " " && !event.target.closest("button")) toggle();
  else return;
  event.preventDefault();
  redraw();
});

function setStatus(isGood, text) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", !isGood);
}

async function start() {
  if (recording) {
    document.body.classList.add("recorded");
    loadRecording(run);
    cursor = 0;
    setStatus(true, `recording of ${run.steps.length} steps`);
    at("model").textContent = recording.dataset.name;
    redraw();
    return;
  }
  const chat = new Chat(at("chat"), at("chat-log"), (id) => {
    wanted = id;
    onStep();
  });
  followServer(run, onStep, setStatus);
  try {
    const models = await (await call("v1/models")).json();
    at("model").textContent = models.data[0].id;
  } catch {
    at("model").textContent = "";
  }
  return chat;
}

start();
