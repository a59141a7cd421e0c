
// Elements, and numbers and times for people. Text becomes text nodes, never markup.

const NS = "http://www.w3.org/2000/svg";
const DATA = JSON.parse(document.getElementById("data").textContent);

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === true) node.setAttribute(key, "");
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat(2).filter(c => c !== null && c !== undefined && c !== false));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes, ...children) => fill(document.createElementNS(NS, tag), attributes, children);

function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s === 0) return "0 s";
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 0.01) return `${(s * 1000).toFixed(2)} ms`;
  if (s < 1) return `${(s * 1000).toPrecision(3)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  if (s < 7200) return `${(s / 60).toFixed(1)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${(s / 86400).toFixed(1)} d`;
}

const count = n => n === null || n === undefined ? "–" : n.toLocaleString("en-US").replaceAll(",", "\u202f");
const percent = v => v === null || v === undefined ? "–" : `${v.toFixed(1)}%`;

// Points of ETT%: two digits where one would say 0.0.
const points = v => v === null || v === undefined ? "–" : v.toFixed(Math.abs(v) < 0.1 ? 2 : 1);

function when(atS) {
  if (atS === null) return "–";
  const at = new Date(atS * 1000);
  return Number.isNaN(at.getTime()) ? "–" : at.toISOString().slice(0, 19).replace("T", " ");
}

const areaName = index => DATA.areas[index].name;
const groupOf = index => DATA.areas[index].group;
