// A small chat that sends real requests to the server.

import { call, events } from "./source.js";

export class Chat {
  constructor(form, log, onRequest) {
    this.form = form;
    this.log = log;
    this.onRequest = onRequest;
    this.messages = [];
    this.number = 0;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    form.querySelector("textarea").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    form.querySelector(".new").addEventListener("click", () => {
      this.messages = [];
      this.log.replaceChildren();
    });
  }

  #submit() {
    const field = this.form.querySelector("textarea");
    const text = field.value.trim();
    if (!text) return;
    field.value = "";
    this.messages.push({ role: "user", content: text });
    this.#say("user", text);
    const copies = Number(this.form.elements.copies.value);
    const maxTokens = Number(this.form.elements.tokens.value);
    const place = this.#say("assistant", "");
    this.#ask([...this.messages], maxTokens, place);
    if (copies > 1) this.#load([...this.messages], maxTokens, copies - 1);
  }

  #say(role, text) {
    const line = document.createElement("p");
    line.className = role;
    line.textContent = text;
    this.log.append(line);
    this.log.scrollTop = this.log.scrollHeight;
    return line;
  }

  #name() {
    return `page-${Date.now().toString(36).slice(-5)}-${++this.number}`;
  }

  async #post(path, body) {
    const headers = { "content-type": "application/json" };
    const answer = await call(path, { method: "POST", headers, body: JSON.stringify(body) });
    if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `the server responded with status ${answer.status}`);
    return answer;
  }

  async #ask(messages, maxTokens, place) {
    const name = this.#name();
    try {
      const answer = await this.#post("v1/chat/completions", { messages, max_tokens: maxTokens, stream: true, request_id: name });
      this.onRequest(`chatcmpl-${name}`);
      for await (const chunk of events(answer)) {
        if (chunk.error) throw new Error(chunk.error.message);
        place.textContent += chunk.choices[0]?.delta.content ?? "";
        this.log.scrollTop = this.log.scrollHeight;
      }
      this.messages.push({ role: "assistant", content: place.textContent });
    } catch (error) {
      this.#say("error", error.message);
    }
  }

  // Send copies of the prompt as load, all in one call, because browsers limit the connections per server.
  async #load(messages, maxTokens, copies) {
    try {
      const { tokens } = await (await this.#post("tokenize", { messages })).json();
      const prompt = Array.from({ length: copies }, () => tokens);
      await (await this.#post("v1/completions", { prompt, max_tokens: maxTokens, request_id: this.#name() })).json();
    } catch (error) {
      this.#say("error", error.message);
    }
  }
}
