// Sources of steps: a server's events, or a recording embedded in the page.

let key = sessionStorage.getItem("treadle-key") ?? "";

export const recording = document.getElementById("recording");

export async function call(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.status !== 401) return answer;
    await askForKey();
  }
}

let asking = null;

function askForKey() {
  // Several calls may be rejected at the same time; ask for the key only once.
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-key");
    const field = dialog.querySelector("input");
    field.value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      key = field.value.trim();
      sessionStorage.setItem("treadle-key", key);
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

// Yields the parsed data of server-sent events.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Follow a server forever. Calls onStatus(is the page live, text about skipped steps or the problem).
export async function followServer(run, onStep, onStatus) {
  for (;;) {
    try {
      const answer = await call("scheduler/steps");
      if (!answer.ok) throw new Error(`the server responded with status ${answer.status}`);
      for await (const record of events(answer)) {
        if (record.state) {
          run.begin(record.state);
          onStatus(true, record.missed ? `live, after skipping ${record.missed} steps that arrived faster than this page can draw` : "live");
        } else {
          run.add(record);
        }
        onStep();
      }
      onStatus(false, "the server closed the connection; retrying");
    } catch (error) {
      onStatus(false, `no connection: ${error.message}; retrying`);
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

export function loadRecording(run) {
  const [header, ...records] = JSON.parse(recording.textContent);
  run.beginRecording(header);
  for (const record of records) run.add(record);
}
