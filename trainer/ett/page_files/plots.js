
// Plots, drawn as SVG. One listener and one tab stop per plot: arrow keys go from bar to bar.

const LEFT = 8, RIGHT = 12;

// Ticks from 0 on, at round numbers of seconds, minutes, hours or days.
function ticks(topS, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  let step = 10 ** Math.floor(Math.log10(Math.max(topS, 1e-6) / most));
  if (step < 1) step *= [1, 2, 5, 10].find(n => n * step * most >= topS);
  else step = steps.find(s => s * most >= topS) || 86400 * Math.ceil(topS / most / 86400);
  return Array.from({ length: Math.floor(topS / step + 1e-9) + 1 }, (_, i) => i * step);
}

function tickName(s, topS) {
  if (s === 0) return "0";
  if (topS < 1) return `${Number((s * 1000).toPrecision(4))} ms`;
  if (topS < 180) return `${Number(s.toPrecision(4))} s`;
  if (topS < 10800) return `${Number((s / 60).toPrecision(3))} min`;
  if (topS < 259200) return `${Number((s / 3600).toPrecision(3))} h`;
  return `${Number((s / 86400).toPrecision(3))} d`;
}

const tip = document.getElementById("tip");

function showTip(text, x, y) {
  if (tip.textContent !== text) tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + box.height + 24 > innerHeight ? Math.max(8, y - box.height - 12) : y + 16}px`;
}

const hideTip = () => { tip.hidden = true; };

// targets: [{x, y, width, height, text}] in the drawing's own units. Hover and arrow keys show texts.
function interactive(svg, label, targets) {
  let at = -1;
  const mark = shape("rect", { class: "mark", visibility: "hidden" });
  svg.append(mark);
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("role", "application");
  svg.setAttribute("aria-label", `${label}. Arrow keys read the bars one by one.`);
  svg.classList.add("chart");
  const put = (n, x, y) => {
    at = n;
    const t = targets[n];
    for (const key of ["x", "y", "width", "height"]) mark.setAttribute(key, t[key]);
    mark.setAttribute("visibility", "visible");
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    showTip(t.text, x ?? box.left + (t.x + t.width / 2) * scale, y ?? box.top + (t.y + t.height) * scale);
  };
  const leave = () => { mark.setAttribute("visibility", "hidden"); hideTip(); };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    let best = -1, bestFar = 3; // bars thinner than a finger: the nearest within three units
    targets.forEach((t, n) => {
      if (y < t.y || y > t.y + t.height) return;
      const far = Math.max(t.x - x, x - t.x - t.width, 0);
      if (far < bestFar) { best = n; bestFar = far; }
    });
    if (best >= 0) put(best, event.clientX, event.clientY); else leave();
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("focus", () => { if (targets.length && svg.matches(":focus-visible")) put(Math.max(at, 0)); });
  svg.addEventListener("keydown", event => {
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: targets.length - 1 }[event.key];
    if (event.key === "Escape") leave();
    if (to === undefined || !targets.length) return;
    event.preventDefault();
    put(Math.max(0, Math.min(targets.length - 1, to)));
  });
}

function axis(nodes, topS, x, y, most) {
  for (const mark of ticks(topS, most)) {
    nodes.push(shape("line", { class: "grid", x1: x(mark), x2: x(mark), y1: y, y2: y + 4 }));
    nodes.push(shape("text", { x: x(mark), y: y + 15, "text-anchor": mark === 0 ? "start" : "middle" }, tickName(mark, topS)));
  }
}

// The seconds of each area in a bar, longest first.
function told(areas) {
  return [...areas].sort((a, b) => b[1] - a[1]).map(([area, s]) => `${areaName(area)}: ${seconds(s)}`).join("\n");
}

// From 100% down to ETT%: one bar for each group of areas that took time.
function waterfall(svg, run, width) {
  const wall = run.wall_s || 1, groups = new Map();
  for (const [area, s] of run.areas) {
    const key = groupOf(area);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push([area, s]);
  }
  const bars = Object.keys(DATA.groups).filter(g => g !== "new" && groups.has(g))
    .map(g => ({ group: g, areas: groups.get(g), seconds: groups.get(g).reduce((sum, [, s]) => sum + s, 0) }));
  const rows = bars.length + 2, height = rows * 26 + 22, name = 158, value = 52;
  // Where little is lost, only the upper part of the axis is shown, and that is said.
  const floor = Math.max(0, Math.floor((run.ett_percent - 0.5 * (100 - run.ett_percent)) / 5) * 5);
  const x = p => name + (width - name - value) * (Math.max(p, floor) - floor) / (100 - floor);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const nodes = [], targets = [];
  let left = 100;
  const row = (n, label, from, to, group, text, title) => {
    const y = n * 26 + 4, w = Math.max(x(from) - x(to), 0.5);
    nodes.push(shape("text", { class: "name", x: name - 10, y: y + 14, "text-anchor": "end" }, label));
    nodes.push(shape("rect", { class: group, "data-points": (from - to).toFixed(4), "data-group": group, x: x(to), y, width: w, height: 18, rx: 2 }));
    nodes.push(shape("text", { class: "value", x: x(from) + 6, y: y + 14 }, text));
    if (n < rows - 1) nodes.push(shape("line", { class: "link", x1: x(to), x2: x(to), y1: y + 18, y2: y + 26 }));
    targets.push({ x: x(to), y, width: w, height: 18, text: title });
  };
  row(0, "Wall time", 100, 0, "end", "100%", `wall time: ${seconds(run.wall_s)}`);
  nodes.at(-1).setAttribute("x1", x(100));
  nodes.at(-1).setAttribute("x2", x(100));
  bars.forEach((bar, n) => {
    const lost = 100 * bar.seconds / wall;
    row(n + 1, DATA.groups[bar.group], left, left - lost, bar.group, `−${points(lost)}`,
      `${DATA.groups[bar.group]}: ${points(lost)} points, ${seconds(bar.seconds)}\n${told(bar.areas)}`);
    left -= lost;
  });
  const fresh = run.areas.filter(([area]) => groupOf(area) === "new");
  row(rows - 1, "ETT", run.ett_percent, 0, "new", percent(run.ett_percent), `ETT: ${percent(run.ett_percent)}\n${told(fresh)}`);
  for (const [at, anchor] of [[floor, "start"], [100, "end"]]) {
    nodes.push(shape("text", { x: x(at), y: height - 4, "text-anchor": anchor }, at === floor && floor > 0 ? `axis begins at ${at}%` : `${at}%`));
  }
  svg.replaceChildren(...nodes);
  interactive(svg, `Waterfall from 100% to an ETT of ${percent(run.ett_percent)}`, targets);
}

// A run's whole time as one bar, for comparing runs.
function sumBar(svg, run, width) {
  let left = 0;
  const nodes = [...run.areas].sort((a, b) => (groupOf(b[0]) === "new") - (groupOf(a[0]) === "new") || a[0] - b[0]).map(([area, s]) => {
    const wide = width * s / (run.wall_s || 1);
    left += wide;
    return shape("rect", { class: groupOf(area), x: left - wide, y: 3, width: wide, height: 14 }, shape("title", {}, `${areaName(area)}: ${seconds(s)}`));
  });
  svg.setAttribute("viewBox", `0 0 ${width} 20`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", told(run.areas));
  svg.replaceChildren(...nodes);
}

// Columns [begin, end, [[area, seconds]...], segments] of a time axis, stacked where several areas share one.
function strip(nodes, targets, columns, x, y, height, fromS, toS) {
  for (const [begin, end, areas, segments] of columns) {
    if (end <= fromS || begin >= toS) continue;
    const left = x(Math.max(begin, fromS)), width = Math.max(x(Math.min(end, toS)) - left, 0.05);
    const sum = areas.reduce((all, [, s]) => all + s, 0) || 1;
    let top = y;
    for (const [area, s] of areas) {
      const part = height * s / sum;
      nodes.push(shape("rect", { class: `bar ${groupOf(area)}`, "data-area": areaName(area), "data-seconds": s.toFixed(6), x: left, y: top, width, height: part }));
      top += part;
    }
    targets.push({
      x: left, y, width, height,
      text: `${told(areas)}\nfrom ${seconds(begin)} to ${seconds(end)}${segments > 1 ? `\n${count(segments)} stretches, too short to be told apart` : ""}`,
    });
  }
}

function timeline(svg, attempt, saves, width) {
  const x = s => LEFT + (width - LEFT - RIGHT) * s / (attempt.wall_s || 1);
  const nodes = [], targets = [];
  strip(nodes, targets, attempt.columns, x, 10, 26, 0, Infinity);
  for (const save of saves) {
    const at = x(Math.min(attempt.wall_s, Math.max(0, save.at_s - attempt.began_s)));
    nodes.push(shape("path", { class: `tick-${save.outcome}`, d: `M${at} 9l-3.5 -7h7z` }));
    targets.push({ x: at - 3, y: 0, width: 6, height: 9.5, text: saveText(save) });
  }
  axis(nodes, attempt.wall_s, x, 36, Math.max(2, Math.floor(width / 110)));
  svg.setAttribute("viewBox", `0 0 ${width} 56`);
  svg.replaceChildren(...nodes);
  interactive(svg, `Timeline of attempt ${attempt.epoch}, ${seconds(attempt.wall_s)}`, targets);
}

// The start alone: what was waited for, and beneath it the stages, which may run at the same time.
function startTimeline(svg, attempt, width) {
  const last = Math.max(...attempt.stages.map(s => s[2]));
  const top = Math.min(attempt.wall_s, Math.max(last, attempt.time_to_start_s || 0) * 1.02) || last;
  const name = 158, x = s => name + (width - name - RIGHT) * Math.min(s, top) / top;
  const nodes = [shape("text", { class: "name", x: name - 10, y: 16, "text-anchor": "end" }, "waited for")], targets = [];
  strip(nodes, targets, attempt.columns, x, 2, 20, 0, top);
  attempt.stages.forEach(([stage, begin, end], n) => {
    const y = 28 + n * 16, known = DATA.areas.find(a => a.name === stage.replaceAll("_", " "));
    const w = Math.max(x(end) - x(begin), 1);
    nodes.push(shape("text", { class: "name", x: name - 10, y: y + 10, "text-anchor": "end" }, stage.length > 26 ? `${stage.slice(0, 25)}…` : stage));
    nodes.push(shape("rect", { class: `stage ${known ? known.group : stage === "pt2_compilation" ? "compile" : "start"}`, "data-stage": stage, x: x(begin), y, width: w, height: 12, rx: 2 }));
    targets.push({ x: x(begin), y, width: w, height: 12, text: `${stage}: ${seconds(end - begin)}\nfrom ${seconds(begin)} to ${seconds(end)}` });
  });
  const bottom = 30 + attempt.stages.length * 16;
  axis(nodes, top, x, bottom, Math.max(2, Math.floor(width / 130)));
  svg.setAttribute("viewBox", `0 0 ${width} ${bottom + 20}`);
  svg.replaceChildren(...nodes);
  interactive(svg, `Start of attempt ${attempt.epoch}`, targets);
}

const saveText = s => `step ${count(s.step)}, attempt ${s.epoch}: ${s.outcome}\nblocked ${seconds(s.blocked_s)}, commit after ${seconds(s.lag_s)}${s.error ? `\n${s.error}` : ""}`;

// One bar per save, from the axis up. of: what is plotted, in seconds.
function saveBars(svg, saves, of, label, width) {
  const height = 132, left = 58, bottom = 18, most = Math.max(...saves.map(s => of(s) || 0), 1e-6);
  const y = s => height - bottom - (height - bottom - 10) * s / most;
  const slot = (width - left - RIGHT) / saves.length, nodes = [], targets = [];
  for (const mark of ticks(most, 3)) {
    nodes.push(shape("line", { class: "grid", x1: left, x2: width, y1: y(mark), y2: y(mark) }));
    nodes.push(shape("text", { x: left - 8, y: y(mark) + 4, "text-anchor": "end" }, tickName(mark, most)));
  }
  saves.forEach((save, n) => {
    const s = of(save), at = s === null ? y(0) - 2 : Math.min(y(s), y(0) - 1);
    nodes.push(shape("rect", { class: `tick-${save.outcome}`, x: left + n * slot, y: at, width: Math.max(0.5, Math.min(slot * 0.8, 18)), height: y(0) - at }));
    targets.push({ x: left + n * slot, y: 4, width: Math.max(0.5, Math.min(slot * 0.8, 18)), height: y(0) - 4, text: saveText(save) });
  });
  nodes.push(shape("text", { x: left, y: height - 3 }, `step ${count(saves[0].step)}`));
  if (saves.length > 1) nodes.push(shape("text", { x: width - RIGHT, y: height - 3, "text-anchor": "end" }, `step ${count(saves.at(-1).step)}`));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...nodes);
  interactive(svg, label, targets);
}
