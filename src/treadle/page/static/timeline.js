// The timeline of the latest steps: one column per step, one row per request.

import { colours, fit, hideNote, showNote } from "./canvas.js";
import { shortName } from "./run.js";

const COLUMN = 9;
const AXIS = 18;

export class Timeline {
  // Calls onPick(step number, request number or null) on a click.
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.rows = [];
    this.first = 0;
    canvas.addEventListener("pointermove", (event) => this.#hover(event));
    canvas.addEventListener("pointerleave", hideNote);
    canvas.addEventListener("click", (event) => {
      const { step, row } = this.#at(event);
      if (step) onPick(step.number, row ?? null);
    });
  }

  draw(run, cursor, followed) {
    this.run = run;
    const width = this.canvas.parentElement.clientWidth;
    this.labels = width < 500 ? 64 : 130;
    const count = Math.max(1, Math.floor((width - this.labels) / COLUMN));
    const end = Math.min(run.steps.length, Math.max(cursor + 1, Math.min(run.steps.length, cursor + Math.ceil(count / 3))));
    const steps = run.steps.slice(Math.max(0, end - count), end);
    this.steps = steps;
    const cells = steps.map((step) => run.cellsOf(step));
    const numbers = new Set();
    for (const column of cells) for (const number of column.keys()) numbers.add(number);
    this.rows = [...numbers].sort((a, b) => a - b);
    this.rowHeight = Math.max(4, Math.min(16, Math.floor(900 / Math.max(1, this.rows.length))));
    const height = AXIS + Math.max(6, this.rows.length) * this.rowHeight;
    const c = fit(this.canvas, width, height);
    const colour = colours();
    const place = new Map(this.rows.map((number, i) => [number, AXIS + i * this.rowHeight]));
    this.#drawRows(c, colour, width, followed);
    cells.forEach((column, i) => {
      const x = this.labels + i * COLUMN;
      for (const [number, cell] of column) {
        if (cell.kind !== "ended") this.#drawCell(c, colour, cell, x, place.get(number));
      }
      if (steps[i].number % 20 === 0) {
        c.fillStyle = colour("dim");
        c.fillText(steps[i].number, x, 11);
        c.fillRect(x, 13, 1, 4);
      }
    });
    const at = steps.indexOf(run.steps[cursor]);
    if (at >= 0) {
      c.strokeStyle = colour("ink");
      c.strokeRect(this.labels + at * COLUMN - 0.5, AXIS - 1.5, COLUMN, height - AXIS + 1);
    }
  }

  #drawRows(c, colour, width, followed) {
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "alphabetic";
    this.rows.forEach((number, i) => {
      const y = AXIS + i * this.rowHeight;
      if (number === followed) {
        c.fillStyle = colour("follow");
        c.fillRect(0, y, width, this.rowHeight);
      }
      if (this.rowHeight >= 11) {
        c.fillStyle = colour("ink");
        c.fillText(shortName(this.run.byNumber[number]?.id ?? ""), 2, y + this.rowHeight - 4, this.labels - 8);
      }
    });
  }

  #drawCell(c, colour, cell, x, y) {
    const h = this.rowHeight - 1;
    c.fillStyle = colour(`k-${cell.kind}`);
    if (cell.kind === "waiting" || cell.kind === "swapped" || cell.kind === "idle") {
      const inset = Math.max(1, Math.floor(h / 3));
      c.fillRect(x, y + inset, COLUMN - 1, h - 2 * inset);
    } else {
      c.fillRect(x, y, COLUMN - 1, h);
    }
    c.strokeStyle = c.fillStyle = colour("paper");
    if (cell.kind === "preempted" || cell.kind === "swapped-out") {
      c.beginPath();
      c.moveTo(x + 1, y + 1);
      c.lineTo(x + COLUMN - 2, y + h - 1);
      c.moveTo(x + COLUMN - 2, y + 1);
      c.lineTo(x + 1, y + h - 1);
      c.stroke();
    } else if (cell.swappedIn) {
      c.fillRect(x + 3, y + 1, 2, h - 2);
    }
    if (cell.end) {
      c.fillStyle = colour("ink");
      c.fillRect(x + COLUMN - 3, y, 2, h);
    }
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const step = this.steps?.[Math.floor((event.clientX - box.left - this.labels) / COLUMN)];
    const row = this.rows[Math.floor((event.clientY - box.top - AXIS) / this.rowHeight)];
    return { step, row };
  }

  #hover(event) {
    const { step, row } = this.#at(event);
    const cell = step && row !== undefined ? this.run.cellOf(step, row) : null;
    const name = row === undefined ? "" : this.run.byNumber[row]?.id;
    if (cell) showNote(event, `Step ${step.number} · ${name} ${this.run.explain(step, row, cell)}`);
    else if (step) showNote(event, `Step ${step.number}: ${step.tokens} tokens in ${(step.duration * 1000).toFixed(1)} ms`);
    else showNote(event, name ?? "");
  }
}
