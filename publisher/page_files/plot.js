// Bar plots over versions, drawn as SVG. Everything from the registry becomes text nodes.

const NS = "http://www.w3.org/2000/svg";
const LEFT = 52, RIGHT = 14, BOTTOM = 18, TOP = 8;

function shape(name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.append(text);
  return node;
}

// Ticks from 0 on, at 1, 2 or 5 times a power of ten.
function ticks(top) {
  const raw = top / 3, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(n => n * power).find(s => s >= raw);
  const count = Math.ceil(top / step - 1e-9);
  return Array.from({ length: count + 1 }, (_, i) => i * step);
}

// bars: [{version, value or null, kind}], oldest first. unit: {divide, name}.
export function drawBars(svg, bars, unit, chosen, pick) {
  const width = svg.clientWidth || 360, height = svg.clientHeight || 130;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const values = bars.map(b => b.value).filter(v => v !== null && v !== undefined);
  if (!values.length) {
    svg.replaceChildren(shape("text", { x: 0, y: 20 }, "nothing yet"));
    return;
  }
  const marks = ticks(Math.max(...values) / unit.divide || 1);
  const top = marks[marks.length - 1] * unit.divide;
  const y = v => TOP + (height - TOP - BOTTOM) * (1 - v / top);
  const slot = (width - LEFT - RIGHT) / bars.length, gap = Math.min(4, slot * 0.25);
  const nodes = [];
  bars.forEach((bar, i) => {
    const area = shape("rect", {
      x: LEFT + i * slot, y: TOP, width: slot, height: height - TOP - BOTTOM,
      class: "slot" + (bar.version === chosen ? " chosen" : ""),
    });
    area.addEventListener("click", () => pick(bar.version));
    const told = bar.value === null || bar.value === undefined ? "unknown" : unit.say(bar.value);
    area.append(shape("title", {}, `version ${bar.version}: ${told}`));
    nodes.push(area);
  });
  for (const mark of marks) {
    const at = y(mark * unit.divide);
    nodes.push(shape("line", { x1: LEFT, x2: width, y1: at, y2: at, class: "grid" }));
    const digits = marks[1] < 0.1 ? 2 : marks[1] < 1 ? 1 : 0;
    const label = mark.toFixed(digits) + (mark === marks[marks.length - 1] ? ` ${unit.name}` : "");
    nodes.push(shape("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, label));
  }
  const every = Math.ceil(bars.length / Math.max(1, Math.floor((width - LEFT - RIGHT) / 44)));
  bars.forEach((bar, i) => {
    if (bar.value !== null && bar.value !== undefined) {
      const at = Math.min(y(bar.value), y(0) - 1);
      nodes.push(shape("rect", {
        x: LEFT + i * slot + gap / 2, y: at, width: Math.max(1, Math.min(slot - gap, 28)),
        height: y(0) - at, rx: Math.min(2, slot / 4), class: `bar ${bar.kind}`,
      }));
    }
    if ((bars.length - 1 - i) % every === 0) {
      nodes.push(shape("text", {
        x: LEFT + i * slot + gap / 2 + Math.min(slot - gap, 28) / 2, y: height - 4, "text-anchor": "middle",
      }, `v${bar.version}`));
    }
  });
  svg.setAttribute("aria-label", bars.map(b => `v${b.version}: ${b.value === null ? "unknown" : unit.say(b.value)}`).join(", "));
  svg.replaceChildren(...nodes);
}
