// Elements, and numbers and times for people.

let skewMs = 0;

// The publisher's clock says when things were; this browser's may differ.
export function setClock(nowS) {
  skewMs = Date.now() - nowS * 1000;
}

// Children that are strings become text nodes, never markup; false and null are left out.
export function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "onclick") node.addEventListener("click", value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat(2).filter(c => c !== null && c !== undefined && c !== false));
  return node;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 120) return `${s.toFixed(1)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${(s / 86400).toFixed(1)} d`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${i === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[i]}`;
}

export function figure(v) {
  if (v === null || v === undefined) return "–";
  if (Number.isInteger(v)) return String(v);
  return Math.abs(v) < 0.001 ? v.toExponential(1) : String(Number(v.toPrecision(4)));
}

export const count = n => n === null || n === undefined ? "–" : n.toLocaleString("en-US").replaceAll(",", "\u202f");

export function ago(atS) {
  const s = Math.max(0, (Date.now() - skewMs) / 1000 - atS);
  if (s < 5) return "just now";
  if (s < 60) return `${Math.floor(s / 5) * 5} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  if (s < 129600) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86400)} d ago`;
}

export function when(atS) {
  if (atS === null || atS === undefined) return "–";
  const date = new Date(atS * 1000);
  const node = el("time", { datetime: date.toISOString(), title: date.toLocaleString() }, ago(atS));
  node.dataset.at = atS;
  return node;
}
