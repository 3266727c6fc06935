// Charts of the latest steps, drawn by uPlot.

import { colours } from "./canvas.js";

const SHOWN = 600;

const fromZero = (_, low, high) => [0, high > 0 ? high * 1.1 : 1];

export class Charts {
  constructor(places) {
    this.places = places; // {tokens, latency, pool}: elements
    this.plots = [];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#make());
    new ResizeObserver(() => this.#resize()).observe(places.tokens);
    this.#make();
  }

  #make() {
    for (const plot of this.plots) plot.destroy();
    const colour = colours();
    const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "11px system-ui, sans-serif" };
    const ticks = (unit) => ({ ...axis, size: 50, values: (_, values) => values.map((value) => `${value}${unit}`) });
    const make = (place, series, axes, scales = {}) =>
      new uPlot(
        {
          width: place.clientWidth || 300,
          height: 130,
          cursor: { y: false },
          legend: { live: true },
          scales: { x: { time: false }, y: { range: fromZero }, ...scales },
          axes: [{ ...axis, size: 24 }, ...axes],
          series: [{ label: "step" }, ...series],
        },
        [[], ...series.map(() => [])],
        place,
      );
    const stepped = uPlot.paths.stepped({ align: 1 });
    const line = (label, name, more = {}) => ({ label, stroke: colour(name), width: 1.2, points: { show: false }, ...more });
    const filled = (label, name) => line(label, name, { paths: stepped, fill: `color-mix(in srgb, ${colour(name)} 45%, transparent)` });
    const dots = { paths: () => null, points: { show: true, size: 6, fill: colour("k-preempted"), stroke: colour("paper") } };
    this.plots = [
      make(this.places.tokens, [filled("tokens", "k-prefill"), filled("decode tokens", "k-decode")], [ticks("")]),
      make(
        this.places.latency,
        [line("longest ITL", "k-waiting-line"), line("ITL (ms)", "k-decode"), line("TTFT (ms, right)", "k-preempted", { scale: "ttft", ...dots })],
        [ticks(""), { ...ticks(""), scale: "ttft", side: 1, grid: { show: false } }],
        { ttft: { range: fromZero } },
      ),
      make(
        this.places.pool,
        [
          filled("KV blocks held", "k-prefill"),
          line("waiting (right)", "k-waiting-line", { scale: "requests" }),
          line("running (right)", "k-decode", { scale: "requests" }),
        ],
        [ticks(""), { ...ticks(""), scale: "requests", side: 1, grid: { show: false } }],
        { requests: { range: fromZero } },
      ),
    ];
    if (this.run) this.draw(this.run, this.cursor);
  }

  #resize() {
    for (const plot of this.plots) plot.setSize({ width: plot.root.parentElement.clientWidth, height: 130 });
  }

  draw(run, cursor) {
    this.run = run;
    this.cursor = cursor;
    const steps = run.steps.slice(Math.max(0, cursor + 1 - SHOWN), cursor + 1);
    const x = steps.map((step) => step.number);
    const ms = (seconds) => (seconds === null ? null : Math.round(seconds * 1e4) / 10);
    this.plots[0].setData([x, steps.map((s) => s.tokens), steps.map((s) => s.tokens - s.prefillTokens)]);
    this.plots[1].setData([
      x,
      steps.map((s) => ms(s.longestItl)),
      steps.map((s) => ms(s.itl)),
      steps.map((s) => (s.ttfts.length ? ms(Math.max(...s.ttfts)) : null)),
    ]);
    this.plots[2].setData([
      x,
      steps.map((s) => s.blocks.referenced),
      steps.map((s) => s.waiting.length),
      steps.map((s) => s.numRunning),
    ]);
  }
}
