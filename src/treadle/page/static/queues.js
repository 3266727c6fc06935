// The three queues: one card per request, with its progress.

import { colourOf } from "./canvas.js";
import { shortName } from "./run.js";

const SHOWN = 40;

export class Queues {
  constructor(places, onPick) {
    this.places = places; // {running, waiting, swapped}: elements that contain .count and .cards
    this.onPick = onPick;
    this.cards = new Map(); // queue and request number → card
  }

  draw(run, step, followed) {
    const queues = step ? run.queuesAt(step) : { running: [], waiting: [], swapped: [] };
    const used = new Set();
    for (const [queue, place] of Object.entries(this.places)) {
      const entries = queues[queue];
      place.querySelector(".count").textContent = entries.length;
      const cards = entries.slice(0, SHOWN).map((entry) => {
        const key = `${queue} ${entry.request.number}`;
        used.add(key);
        if (!this.cards.has(key)) this.cards.set(key, this.#make(entry.request));
        const card = this.cards.get(key);
        this.#fill(card, run, step, entry, followed);
        return card;
      });
      const list = place.querySelector(".cards");
      if (cards.some((card, i) => list.children[i] !== card) || list.children.length !== cards.length) {
        list.replaceChildren(...cards);
      }
      place.querySelector(".more").textContent =
        entries.length > SHOWN ? `and ${entries.length - SHOWN} more` : entries.length ? "" : "empty";
    }
    for (const key of this.cards.keys()) if (!used.has(key)) this.cards.delete(key);
  }

  #make(request) {
    const card = document.getElementById("card").content.firstElementChild.cloneNode(true);
    card.querySelector(".name").textContent = shortName(request.id);
    card.title = request.id;
    card.dataset.request = request.id;
    card.style.setProperty("--own", colourOf(request.number));
    card.addEventListener("click", () => this.onPick(request.number));
    return card;
  }

  #fill(card, run, step, { request, cell, computed, outputs }, followed) {
    card.classList.toggle("followed", request.number === followed);
    const prompt = request.promptTokens || 1;
    const numPreemptions = request.preemptions.filter((at) => at <= step.number).length;
    const wanted = request.maxTokens === null ? Math.max(outputs, 1) : request.maxTokens * request.n;
    card.querySelector(".prompt").style.width = `${(100 * Math.min(1, computed / prompt)).toFixed(1)}%`;
    card.querySelector(".output").style.width = `${(100 * Math.min(1, outputs / wanted)).toFixed(1)}%`;
    card.querySelector(".figures").textContent =
      `${computed}/${request.promptTokens} + ${outputs}${request.n > 1 ? ` (${request.n} sequences)` : ""}` +
      (numPreemptions ? ` · preempted ${numPreemptions}×` : "");
    card.querySelector(".why").textContent = run.explain(step, request.number, cell);
  }
}
