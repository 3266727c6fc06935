// Code shared by the canvases: sharp pixels, colours from the style sheet, and the tooltip.

export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const known = new Map();
  return (name) => {
    if (!known.has(name)) known.set(name, style.getPropertyValue(`--${name}`).trim());
    return known.get(name);
  };
}

// One colour per request: hues a golden angle apart.
export function colourOf(number) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${(number * 137.508) % 360} 55% ${isDark ? 58 : 48}%)`;
}

const note = document.getElementById("note");

export function showNote(event, text) {
  note.textContent = text;
  note.hidden = !text;
  if (!text) return;
  const box = note.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const above = event.clientY + 18 + box.height > window.innerHeight;
  note.style.left = `${Math.max(4, x)}px`;
  note.style.top = `${above ? event.clientY - box.height - 12 : event.clientY + 18}px`;
}

export function hideNote() {
  note.hidden = true;
}
