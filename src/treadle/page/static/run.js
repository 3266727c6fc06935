// The history of a run: the initial state from a server or a recording, then one record per step.
// All views read from it, for any step that it still contains.

export const KINDS = ["prefill", "chunk", "re-prefill", "decode", "beam"];
export const FREE = -2;
export const CACHED = -1;
const FIELDS = 4; // per cell: request number, kind, tokens computed or generated, target number of tokens
const SHARED = 2 ** 24; // added to a holder's number when several sequences hold the block

export class Run {
  constructor(limit = 4000) {
    this.limit = limit;
    this.clear();
  }

  clear() {
    this.requests = new Map(); // id → request
    this.byNumber = [];
    this.steps = [];
    this.events = [];
    this.settings = null;
    this.waitReasons = {}; // code → text
    this.blockSize = 0;
    this.numDropped = 0; // steps dropped from the history
    this.blocks = new BlockMap(0);
    this.highestBlock = -1;
  }

  get isEmpty() {
    return this.steps.length === 0;
  }

  // Start from a server's state: unfinished requests, and the holder of each block.
  begin(state) {
    this.clear();
    this.settings = state.scheduler;
    this.waitReasons = state.wait_reasons;
    this.blockSize = state.blocks.size;
    this.numBlocks = state.blocks.total;
    this.blocks = new BlockMap(this.numBlocks);
    for (const queue of ["running", "swapped", "waiting"]) {
      for (const known of state[queue]) {
        const request = this.#request(known.id, known.prompt_tokens, known.max_tokens, known.n, known.arrival);
        for (const sequence of known.sequences) {
          request.computed = Math.max(request.computed, sequence.computed);
          request.outputs += Math.max(0, sequence.tokens - known.prompt_tokens);
        }
        request.computed = Math.min(request.computed, known.prompt_tokens);
        request.pauses.push([-1, request.computed, request.outputs]);
      }
    }
    this.blocks.apply(this.#changes(state.block_changes));
    this.blocks.forget();
  }

  // Start from the header of a recording.
  beginRecording(header) {
    this.clear();
    this.limit = Infinity;
    this.settings = header.scheduler;
    this.waitReasons = header.wait_reasons;
    this.blockSize = header.block_size;
    this.numBlocks = header.num_blocks;
    this.blocks = new BlockMap(this.numBlocks);
  }

  add(record) {
    const step = {
      number: record.step,
      time: record.time,
      duration: record.duration,
      tokens: record.tokens,
      prefillTokens: 0,
      blocks: record.blocks,
      ttfts: [],
      itl: null, // median and maximum of the requests' time since their previous token
      longestItl: null,
      reasons: new Map(),
    };
    for (const [id, a] of Object.entries(record.arrived)) {
      // An id may be reused after its request has ended.
      if (this.requests.get(id)?.outcome !== null) this.#request(id, a.prompt_tokens, a.max_tokens, a.n, a.time);
    }
    const numbers = (ids) => Int32Array.from(ids, (id) => this.#known(id).number);
    step.cells = this.#cells(record, step);
    for (const queue of ["waiting", "swapped"]) {
      const entries = Array.isArray(record[queue]) ? record[queue] : Object.entries(record[queue]);
      step[queue] = numbers(entries.map(([id]) => id));
      for (const [id, reason] of entries) {
        if (reason) step.reasons.set(this.#known(id).number, reason);
      }
    }
    step.idle = numbers(record.idle);
    step.numRunning = step.cells.length / FIELDS + step.idle.length;
    step.swappedIn = numbers(record.swapped_in);
    step.preempted = record.preempted.map((p) => ({
      number: this.#known(p.request).number,
      by: this.#known(p.for).number,
      mode: p.mode,
    }));
    step.finished = Object.entries(record.finished).map(([id, outcome]) => {
      const request = this.#known(id);
      request.outcome = outcome;
      request.lastStep = record.step;
      return request.number;
    });
    for (const number of [...step.preempted.map((p) => p.number), ...step.finished, ...step.waiting]) {
      const request = this.byNumber[number];
      const last = request.pauses.at(-1);
      if (!last || last[1] !== request.computed || last[2] !== request.outputs) {
        request.pauses.push([record.step, request.computed, request.outputs]);
      }
    }
    for (const p of step.preempted) this.byNumber[p.number].preemptions.push(record.step);
    this.blocks.append(this.#changes(record.block_changes ?? {}));
    this.steps.push(step);
    this.#addEvents(step, Object.keys(record.arrived));
    if (this.steps.length > this.limit) this.#drop();
    return step;
  }

  #request(id, promptTokens, maxTokens, n, arrival) {
    const request = {
      id, promptTokens, maxTokens, n, arrival,
      number: this.byNumber.length,
      computed: 0,
      outputs: 0,
      lastToken: null, // time of the latest token
      preemptions: [], // steps
      pauses: [], // [step, computed, outputs] at the steps at which the request stopped running
      outcome: null,
      lastReason: "",
      lastStep: 0,
    };
    this.byNumber.push(request);
    this.requests.set(id, request);
    return request;
  }

  #known(id) {
    return this.requests.get(id) ?? this.#request(id, 0, null, 1, 0);
  }

  #cells(record, step) {
    const ran = Object.entries(record.ran);
    const cells = new Int32Array(ran.length * FIELDS);
    const end = record.time + record.duration;
    const waits = [];
    const gotToken = (request) => {
      if (request.lastToken !== null) waits.push(end - request.lastToken);
      request.lastToken = end;
    };
    ran.forEach(([id, part], i) => {
      const request = this.#known(id);
      let kind = KINDS.indexOf(part.kind);
      let done, wanted;
      if (part.kind === "prefill" || part.kind === "re-prefill") {
        done = part.start + part.count;
        wanted = part.of;
        step.prefillTokens += part.count;
        request.computed = Math.min(done, request.promptTokens);
        if (part.kind === "prefill" && part.count < part.of && (part.start > 0 || done < wanted)) kind = 1;
        if (done >= wanted) {
          if (request.outputs === 0) {
            step.ttfts.push(end - request.arrival);
            request.outputs = request.n;
          } else request.outputs += part.sequences;
          gotToken(request);
        }
      } else {
        request.outputs += part.count;
        gotToken(request);
        done = request.outputs;
        wanted = request.maxTokens === null ? 0 : request.maxTokens * request.n;
      }
      cells.set([request.number, kind, done, wanted], i * FIELDS);
    });
    if (waits.length) {
      step.itl = median(waits);
      step.longestItl = Math.max(...waits);
    }
    return cells;
  }

  #changes(described) {
    const changes = [];
    const spread = (runs, code) => {
      for (let i = 0; i < runs.length; i += 2) {
        for (let block = runs[i]; block < runs[i] + runs[i + 1]; block++) changes.push(block, code);
        this.highestBlock = Math.max(this.highestBlock, runs[i] + runs[i + 1] - 1);
      }
    };
    spread(described.free ?? [], FREE);
    spread(described.cached ?? [], CACHED);
    for (const [id, runs] of Object.entries(described.held ?? {})) spread(runs, this.#known(id).number);
    for (const [id, runs] of Object.entries(described.shared ?? {})) spread(runs, this.#known(id).number + SHARED);
    return changes;
  }

  #drop() {
    const count = Math.ceil(this.limit / 10);
    this.steps.splice(0, count);
    this.blocks.dropFirst(count);
    this.numDropped += count;
    const oldest = this.steps[0].number;
    for (const request of this.byNumber) {
      if (!request) continue;
      if (request.outcome && request.lastStep < oldest) {
        if (this.requests.get(request.id) === request) this.requests.delete(request.id);
        delete this.byNumber[request.number];
      } else {
        while (request.pauses.length > 1 && request.pauses[1][0] < oldest) request.pauses.shift();
      }
    }
    while (this.events.length && this.events[0].step < oldest) this.events.shift();
  }

  // What each request did in a step: number → {kind, done, wanted, reason, by, mode, swappedIn, end}.
  cellsOf(step, isWanted = () => true) {
    const found = new Map();
    for (let i = 0; i < step.cells.length; i += FIELDS) {
      if (isWanted(step.cells[i])) found.set(step.cells[i], ranCell(step.cells, i));
    }
    for (const queue of ["waiting", "swapped"]) {
      for (const number of step[queue].filter(isWanted)) {
        found.set(number, { kind: queue, reason: step.reasons.get(number) ?? "" });
      }
    }
    for (const number of step.idle.filter(isWanted)) found.set(number, { kind: "idle" });
    for (const number of step.swappedIn) {
      if (found.has(number)) found.get(number).swappedIn = true;
    }
    for (const p of step.preempted) if (isWanted(p.number)) found.set(p.number, preemptedCell(p));
    for (const number of step.finished.filter(isWanted)) {
      const cell = found.get(number) ?? { kind: "ended" };
      cell.end = this.byNumber[number]?.outcome.finish_reasons.join("/") ?? "";
      found.set(number, cell);
    }
    return found;
  }

  // What one request did in a step.
  cellOf(step, number) {
    return this.cellsOf(step, (other) => other === number).get(number);
  }

  // The three queues at a step: [{request, computed, outputs, reason, cell}].
  queuesAt(step) {
    const cells = this.cellsOf(step);
    const queues = { running: [], waiting: [], swapped: [] };
    for (const [number, cell] of cells) {
      const request = this.byNumber[number];
      if (!request || cell.kind === "ended") continue;
      const queue = { waiting: "waiting", preempted: "waiting", swapped: "swapped", "swapped-out": "swapped" }[cell.kind];
      queues[queue ?? "running"].push({ request, cell, ...this.progressAt(request, step, cell) });
    }
    queues.running.sort((a, b) => a.request.number - b.request.number);
    return queues;
  }

  // Computed prompt tokens and generated tokens of a request after a step.
  progressAt(request, step, cell) {
    if (cell?.kind === "decode" || cell?.kind === "beam") {
      return { computed: request.promptTokens, outputs: cell.done };
    }
    let at = [0, 0, 0];
    for (const pause of request.pauses) if (pause[0] <= step.number) at = pause;
    if (cell?.kind === "prefill" || cell?.kind === "chunk") {
      return { computed: cell.done, outputs: cell.done >= cell.wanted ? request.n : 0 };
    }
    if (cell?.kind === "re-prefill") {
      return { computed: Math.min(cell.done, request.promptTokens), outputs: at[2] };
    }
    return { computed: at[1], outputs: at[2] };
  }

  indexOf(number) {
    const index = number - (this.steps[0]?.number ?? 0);
    return Math.max(0, Math.min(this.steps.length - 1, index));
  }

  // Describe a cell in a sentence.
  explain(step, number, cell) {
    const name = (n) => shortName(this.byNumber[n]?.id ?? "?");
    const end = cell.end ? ` It finishes in this step: ${cell.end}.` : "";
    const back = cell.swappedIn ? "resumes from the host tier, then " : "";
    switch (cell.kind) {
      case "prefill":
        return `${back}computes its prompt of ${cell.wanted} tokens.${end}`;
      case "chunk":
        return `computes a chunk of its prompt, up to token ${cell.done} of ${cell.wanted}.${end}`;
      case "re-prefill":
        return `${back}recomputes its KV, up to token ${cell.done} of ${cell.wanted}.${end}`;
      case "decode":
      case "beam":
        return `${back}generates token ${cell.done}${cell.wanted ? ` of at most ${cell.wanted}` : ""}.${end}`;
      case "waiting":
        return cell.reason ? `is waiting: ${this.waitReasons[cell.reason]}.` : "is waiting behind another request.";
      case "swapped":
        return cell.reason ? `is in the host tier: ${this.waitReasons[cell.reason]}.` : "is in the host tier.";
      case "idle":
        return "is running, but not scheduled in this step.";
      case "preempted":
      case "swapped-out": {
        const how = cell.kind === "preempted"
          ? "is preempted: it gives up its blocks and will be recomputed"
          : "is preempted: its blocks are swapped out to the host tier";
        return cell.by === number
          ? `${how}. No block was free, and no running request ranks behind it.${end}`
          : `${how}, because ${name(cell.by)} needed a block, none was free, and this one ranks last.${end}`;
      }
      default:
        return `has finished${cell.end ? `: ${cell.end}` : ""}.`;
    }
  }

  #addEvents(step, arrived) {
    const event = (number, kind, text) => this.events.push({ step: step.number, number, kind, text });
    for (const id of arrived) {
      const request = this.#known(id);
      event(request.number, "arrived", `arrives with ${request.promptTokens} prompt tokens.`);
    }
    const cells = this.cellsOf(step);
    for (const [number, cell] of cells) {
      const request = this.byNumber[number];
      const reason = cell.kind === "waiting" || cell.kind === "swapped" ? cell.reason : "";
      const isNews =
        cell.kind === "preempted" || cell.kind === "swapped-out" || cell.swappedIn || cell.end ||
        (cell.kind === "re-prefill" && request.lastKind !== "re-prefill") || (reason && reason !== request.lastReason);
      if (isNews) event(number, cell.end ? "ended" : cell.kind, this.explain(step, number, cell));
      if (reason || cell.kind === "decode") request.lastReason = reason;
      request.lastKind = cell.kind;
    }
  }

  // The history of one request: one line for each run of steps in which it did the same.
  history(request, lastStep) {
    const lines = [];
    for (const step of this.steps) {
      if (step.number > lastStep) break;
      const cell = this.cellOf(step, request.number);
      if (!cell) continue;
      const key = `${cell.kind}|${cell.reason ?? ""}|${cell.by ?? ""}|${cell.end ?? ""}`;
      const last = lines.at(-1);
      if (last && last.key === key && cell.kind !== "chunk") {
        last.last = step.number;
        last.text = this.explain(step, request.number, cell);
      } else {
        lines.push({ key, kind: cell.kind, first: step.number, last: step.number, text: this.explain(step, request.number, cell) });
      }
    }
    return lines;
  }
}

function ranCell(cells, i) {
  return { kind: KINDS[cells[i + 1]], done: cells[i + 2], wanted: cells[i + 3] };
}

function preemptedCell(p) {
  return { kind: p.mode === "swap" ? "swapped-out" : "preempted", by: p.by, mode: p.mode };
}

// The holder of each block at any step: changes are kept with the values they replaced, so that they can be undone.
export class BlockMap {
  constructor(numBlocks) {
    this.holders = new Int32Array(numBlocks).fill(FREE);
    this.log = []; // per step: [block, before, after, …]
    this.at = 0; // steps of the log that are applied
  }

  apply(changes) {
    const entry = new Int32Array((changes.length / 2) * 3);
    for (let i = 0, k = 0; i < changes.length; i += 2) {
      entry[k++] = changes[i];
      entry[k++] = this.holders[changes[i]];
      entry[k++] = changes[i + 1];
      this.holders[changes[i]] = changes[i + 1];
    }
    this.log.push(entry);
    this.at = this.log.length;
  }

  append(changes) {
    this.seek(this.log.length);
    this.apply(changes);
  }

  seek(count) {
    while (this.at > count) {
      const entry = this.log[--this.at];
      for (let k = entry.length - 3; k >= 0; k -= 3) this.holders[entry[k]] = entry[k + 1];
    }
    while (this.at < count) {
      const entry = this.log[this.at++];
      for (let k = 0; k < entry.length; k += 3) this.holders[entry[k]] = entry[k + 2];
    }
  }

  dropFirst(count) {
    this.log.splice(0, count);
    this.at = this.log.length;
  }

  // Make the current state the first one.
  forget() {
    this.log = [];
    this.at = 0;
  }

  static number(holder) {
    return holder >= SHARED ? holder - SHARED : holder;
  }

  static isShared(holder) {
    return holder >= SHARED;
  }
}

// The median of the values (of an even number, the upper one of the two in the middle); undefined for an empty array.
// Sorts the values in place.
export function median(values) {
  return values.sort((a, b) => a - b)[values.length >> 1];
}

export function shortName(id) {
  const name = id.replace(/^(chatcmpl|cmpl)-/, "");
  return /^[0-9a-f]{32}$/.test(name) ? name.slice(0, 6) : name.length > 24 ? `${name.slice(0, 23)}…` : name;
}
