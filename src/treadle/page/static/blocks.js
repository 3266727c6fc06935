// Map of the KV pool: one cell per block, in the colour of the request that holds it.

import { colourOf, colours, fit, hideNote, showNote } from "./canvas.js";
import { BlockMap, CACHED, FREE } from "./run.js";

export class BlockView {
  constructor(canvas, caption, onPick) {
    this.canvas = canvas;
    this.caption = caption;
    canvas.addEventListener("pointermove", (event) => this.#hover(event));
    canvas.addEventListener("pointerleave", hideNote);
    canvas.addEventListener("click", (event) => {
      const holder = this.run?.blocks.holders[this.#at(event)];
      if (holder >= 0) onPick(BlockMap.number(holder));
    });
  }

  draw(run, cursor, followed) {
    this.run = run;
    run.blocks.seek(cursor + 1);
    const width = this.canvas.parentElement.clientWidth;
    // Omit blocks that were never used; they would only make the others smaller.
    const count = Math.min(run.numBlocks ?? 0, Math.max(64, run.highestBlock + 1));
    this.size = count > 6000 ? 5 : count > 1500 ? 8 : count > 300 ? 12 : 18;
    this.perRow = Math.max(8, Math.floor(width / this.size));
    this.count = count;
    const c = fit(this.canvas, width, Math.max(this.size, Math.ceil(count / this.perRow) * this.size));
    const colour = colours();
    const inner = this.size - 1;
    // Fade the blocks of other requests while the followed request holds any.
    const fades = followed !== null && run.blocks.holders.some((holder) => BlockMap.number(holder) === followed);
    for (let block = 0; block < count; block++) {
      const x = (block % this.perRow) * this.size;
      const y = Math.floor(block / this.perRow) * this.size;
      const holder = run.blocks.holders[block];
      if (holder === FREE) {
        c.fillStyle = colour("free");
        c.fillRect(x, y, inner, inner);
      } else if (holder === CACHED) {
        c.fillStyle = colour("cached");
        c.fillRect(x, y, inner, inner);
      } else {
        const number = BlockMap.number(holder);
        c.globalAlpha = !fades || followed === number ? 1 : 0.25;
        c.fillStyle = colourOf(number);
        c.fillRect(x, y, inner, inner);
        c.globalAlpha = 1;
        if (BlockMap.isShared(holder)) {
          c.fillStyle = colour("paper");
          c.fillRect(x + inner / 2 - 1, y + inner / 2 - 1, 2, 2);
        }
      }
    }
    const { referenced, cached, free, host_used } = run.steps[cursor]?.blocks ?? {};
    const untouched = run.numBlocks - count;
    this.caption.textContent = referenced === undefined ? "" :
      `${referenced} held · ${cached} cached · ${free} free · ${host_used} in the host tier` +
      (untouched > 0 ? ` · ${untouched.toLocaleString("en")} never used (not drawn)` : "");
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const block = Math.floor((event.clientY - box.top) / this.size) * this.perRow + column;
    return column < this.perRow && block < this.count ? block : -1;
  }

  #hover(event) {
    const block = this.run ? this.#at(event) : -1;
    if (block < 0) return hideNote();
    const holder = this.run.blocks.holders[block];
    const state =
      holder === FREE ? "free" :
      holder === CACHED ? "cached: no request holds it, and the prefix cache can still use its content" :
      `held by ${this.run.byNumber[BlockMap.number(holder)]?.id}${BlockMap.isShared(holder) ? ", shared by several sequences" : ""}`;
    showNote(event, `Block ${block}: ${state}`);
  }
}
