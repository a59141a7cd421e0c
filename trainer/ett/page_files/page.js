
// The page: cards, plots and tables of each run.

const cell = (kind, ...children) => el("td", { class: kind || null }, ...children);
const badge = kind => el("span", { class: `badge ${kind}` }, ENDED[kind] || kind);
const ENDED = { unknown: "running, or unknown" };
const empty = text => el("p", { class: "empty" }, text);
const pairs = list => el("dl", {}, list.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

function table(heads, rows, label, kind = "scroll") {
  return el("div", { class: kind, tabindex: "0", role: "region", "aria-label": label }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map(([name, kind]) => el("th", { class: kind, scope: "col" }, name)))),
    el("tbody", {}, rows)));
}

// Plots are drawn once they are in the document, where they have a width, and again when that changes.
const plots = [];

function plot(draw, id) {
  const svg = shape("svg", { id });
  plots.push({ svg, draw, width: 0 });
  return svg;
}

function drawAll() {
  for (const p of plots) {
    const width = Math.round(p.svg.getBoundingClientRect().width);
    if (!width || width === p.width) continue; // not shown yet, or nothing new
    p.width = width;
    const fresh = p.svg.cloneNode(false); // without the listeners of the drawing before it
    p.svg.replaceWith(fresh);
    p.svg = fresh;
    p.draw(fresh, width);
  }
}

function cards(run) {
  const saves = run.saves, o = saves.outcomes;
  const bad = ["failed", "skipped", "lost"].filter(k => o[k]).map(k => `${count(o[k])} ${k}`).join(", ");
  return el("div", { class: "cards" },
    el("div", { class: "card ett" }, el("h3", {}, "ETT"), el("div", { class: "big" }, percent(run.ett_percent)),
      el("p", { class: "muted" }, `of ${seconds(run.wall_s)} were training on new data`)),
    el("div", { class: "card" }, el("h3", {}, "Interruptions"), pairs([
      ["time to start", seconds(run.time_to_start_s)], ["time to recover", seconds(run.time_to_recover_s)],
      ["failures", count(run.failures)], ["preemptions", count(run.preemptions)]])),
    el("div", { class: "card" }, el("h3", {}, "Work"), pairs([
      ["attempts", count(run.attempts.length)], ["new batches", count(run.batches_new)],
      ["repeated batches", count(run.batches_repeated)], ["repeated samples", count(run.samples_repeated)]])),
    el("div", { class: "card" }, el("h3", {}, "Saves"), pairs([
      ["committed", count(o.committed)], ["otherwise", bad || "none"], ["interval", seconds(run.interval_s)],
      ["blocked, median", seconds(saves.blocked_median_s)], ["to commit, median", seconds(saves.lag_median_s)]])));
}

function advice(run) {
  const a = run.advice, now = a.points_now === null ? "" : `${points(a.points_now)} points now, `;
  return el("div", { class: "advice" }, el("h4", {}, "How often to save"),
    el("p", {}, "Every ", el("b", {}, seconds(a.interval_s)), a.interval_steps !== null && ` (${count(a.interval_steps)} steps)`,
      `: saving and repeating cost ${now}${points(a.points_then)} then.`),
    el("p", { class: "muted" }, a.why));
}

function lossTable(run) {
  return el("section", { class: "panel" }, el("h3", {}, "Largest losses"),
    run.losses.length ? table([["Area"], ["Time", "num"], ["Points", "num"], ["What mends it"]], run.losses.map(l => el("tr", {},
      cell("keep", el("span", { class: `swatch ${groupOf(l.area)}` }), areaName(l.area)), cell("num", seconds(l.seconds)),
      cell("num", points(l.points)), cell("", l.mend))), "Largest losses") : empty("None."),
    run.advice && advice(run),
    run.notes.length ? [el("h4", {}, "Notes"), el("ul", { class: "notes" }, run.notes.map(n => el("li", {}, n)))] : null);
}

function legend(run) {
  const used = new Set(run.areas.map(([area]) => groupOf(area)));
  return el("ul", { class: "legend", "aria-label": "Colours" }, Object.entries(DATA.groups).filter(([key]) => used.has(key))
    .map(([key, label]) => el("li", {}, el("span", { class: `swatch ${key}` }), label)));
}

// All attempts on one axis, each as one bar of what it spent its time on.
function overview(run) {
  return plot((svg, width) => {
    const x = s => LEFT + (width - LEFT - RIGHT) * (s - run.began_s) / (run.wall_s || 1), nodes = [], targets = [];
    for (const a of run.attempts) {
      const left = x(a.began_s), wide = Math.max(x(a.began_s + a.wall_s) - left, 0.5), sum = a.areas.reduce((all, [, s]) => all + s, 0) || 1;
      let top = 2;
      for (const [area, s] of a.areas) {
        nodes.push(shape("rect", { class: groupOf(area), x: left, y: top, width: wide, height: 26 * s / sum }));
        top += 26 * s / sum;
      }
      targets.push({ x: left, y: 2, width: wide, height: 26, text: `attempt ${a.epoch}, ${a.ended}: ${seconds(a.wall_s)}\n${told(a.areas)}` });
    }
    axis(nodes, run.wall_s, x, 28, Math.max(2, Math.floor(width / 110)));
    svg.setAttribute("viewBox", `0 0 ${width} 48`);
    svg.replaceChildren(...nodes);
    interactive(svg, `${run.attempts.length} attempts over ${seconds(run.wall_s)}`, targets);
  });
}

function attemptPlots(run, number) {
  return run.attempts.filter(a => a.columns.length).map(a => {
    const saves = run.saves.plotted.filter(s => s.epoch === a.epoch);
    const merged = a.segments > a.columns.length;
    return el("div", { class: "attempt" },
      el("h4", {}, `Attempt ${a.epoch}`, el("span", {}, `${when(a.began_s)} UTC · ${seconds(a.wall_s)} · ${ENDED[a.ended] || a.ended}`,
        merged && ` · ${count(a.segments)} stretches drawn as ${count(a.columns.length)} columns; a column is split by its areas' seconds`)),
      plot((svg, width) => timeline(svg, a, saves, width), `timeline-${number}-${a.epoch}`),
      a.stages.length ? [el("h4", {}, "Its start", el("span", {}, "stages may run at the same time")),
        plot((svg, width) => startTimeline(svg, a, width), `start-${number}-${a.epoch}`)] : null);
  });
}

function timelines(run, number) {
  const drawn = attemptPlots(run, number), hidden = run.attempts.filter(a => a.wall_s > 0).length - drawn.length, open = drawn.slice(-6), older = drawn.slice(0, -6);
  return el("section", { class: "panel" }, el("h3", {}, "Where the time went", el("span", {}, "triangles are saves")), legend(run),
    run.attempts.length > 1 && [el("h4", {}, "All attempts", el("span", {}, "each bar is split by its areas' seconds")), overview(run)],
    hidden > 0 && el("p", { class: "empty" }, `The oldest ${count(hidden)} of ${count(run.attempts.length)} attempts are drawn here only; the table below has all.`),
    older.length ? folded(`${count(older.length)} earlier attempts`, () => older) : null, open);
}

function folded(title, build) {
  const node = el("details", {}, el("summary", {}, title));
  node.addEventListener("toggle", () => {
    if (node.childElementCount === 1) node.append(...build());
    drawAll();
  });
  return node;
}

function saves(run) {
  const s = run.saves;
  if (!s.count) return el("section", { class: "panel" }, el("h3", {}, "Saves"), empty("Nothing was saved."));
  const some = s.plotted.length < s.count ? `the longest of each ${count(Math.ceil(s.count / s.plotted.length))} of ${count(s.count)} saves` : "each save";
  return el("section", { class: "panel" }, el("h3", {}, "Saves", el("span", {}, `${count(s.count)}, together ${seconds(s.blocked_s)} blocked; longest ${seconds(s.blocked_max_s)}`)),
    el("div", { class: "pair" },
      el("div", {}, el("h4", {}, "Blocked", el("span", {}, some)), plot((svg, w) => saveBars(svg, s.plotted, v => v.blocked_s, "Seconds blocked per save", w))),
      el("div", {}, el("h4", {}, "From save to commit", el("span", {}, some)), plot((svg, w) => saveBars(svg, s.plotted, v => v.lag_s, "Seconds from save to commit", w)))),
    s.listed.length < s.count && el("p", { class: "empty" }, `${count(s.listed.length)} of ${count(s.count)} saves are listed: the newest, the longest, and those that went wrong.`),
    table([["Attempt", "num"], ["Step", "num"], ["Blocked", "num"], ["To commit", "num"], ["Outcome"], ["Error"]], [...s.listed].reverse().map(v => el("tr", {},
      cell("num", v.epoch), cell("num", count(v.step)), cell("num", seconds(v.blocked_s)), cell("num", seconds(v.lag_s)),
      cell("keep", badge(v.outcome)), cell("", v.error))), "Saves"));
}

function attempts(run) {
  const shown = run.attempts.slice(-8);
  const of = (areas, index) => (areas.find(([area]) => area === index) || [0, 0])[1];
  const share = s => run.wall_s ? percent(100 * s / run.wall_s) : "–";
  return [
    el("section", { class: "panel" }, el("h3", {}, "Attempts and restores"), table(
      [["Attempt", "num"], ["Began (UTC)"], ["Wall", "num"], ["Ended"], ["Ranks", "num"], ["Resumed at", "num"], ["Last step", "num"],
        ["To start", "num"], ["To recover", "num"], ["New batches", "num"], ["Repeated", "num"], ["Lost", "num"], ["Saves", "num"]],
      run.attempts.map(a => el("tr", {}, cell("num", a.epoch), cell("keep", when(a.began_s)), cell("num", seconds(a.wall_s)), cell("", badge(a.ended)),
        cell("num", a.ranks === a.world_size ? count(a.ranks) : `${a.ranks} of ${a.world_size}`),
        cell("num", a.resumed_step === null ? "–" : `step ${count(a.resumed_step)}`), cell("num", count(a.last_step)),
        cell("num", seconds(a.time_to_start_s)), cell("num", seconds(a.time_to_recover_s)), cell("num", count(a.batches_new)),
        cell("num", count(a.batches_repeated)), cell("num", count(a.lost_batches)), cell("num", count(a.saves.committed)))), "Attempts and restores")),
    el("section", { class: "panel" }, el("h3", {}, "Areas", el("span", {}, shown.length < run.attempts.length ? `all attempts together, and the newest ${shown.length}` : "")), table(
      [["Area"], ...shown.map(a => [`attempt ${a.epoch}`, "num"]), ["All", "num"], ["Share", "num"]],
      [...run.areas].sort((a, b) => a[0] - b[0]).map(([area, s]) => el("tr", {},
        cell("keep", el("span", { class: `swatch ${groupOf(area)}` }), areaName(area)),
        shown.map(a => cell("num", seconds(of(a.areas, area)))), cell("num", seconds(s)), cell("num", share(s))))
        .concat(el("tr", {}, cell("keep", el("b", {}, "wall time")), shown.map(a => cell("num", seconds(a.wall_s))), cell("num", seconds(run.wall_s)), cell("num", "100.0%"))), "Areas", "scroll tall"))];
}

function runParts(run, number) {
  return [cards(run), el("div", { class: "pair" },
    el("figure", { class: "panel" }, el("figcaption", {}, "From 100% to ETT", el("span", {}, "points of wall time")),
      plot((svg, width) => waterfall(svg, run, width), `waterfall-${number}`)), lossTable(run)),
  timelines(run, number), saves(run), ...attempts(run)];
}

function fleet(runs) {
  const most = run => [...run.losses].sort((a, b) => b.points - a.points)[0];
  return [el("div", { class: "cards" }, el("div", { class: "card ett", id: "fleet" }, el("h3", {}, `ETT of ${count(runs.length)} runs`),
    el("div", { class: "big" }, percent(DATA.fleet_percent)), el("p", { class: "muted" }, "weighted by wall time times ranks"))),
  el("section", { class: "panel", id: "comparison" }, el("h3", {}, "Runs"), legend({ areas: runs.flatMap(run => run.areas) }), table(
    [["Root"], ["ETT", "num"], ["Where the time went"], ["Wall", "num"], ["Attempts", "num"], ["Failures", "num"], ["Preemptions", "num"], ["To start", "num"], ["To recover", "num"], ["Repeated", "num"], ["Largest loss"]],
    runs.map((run, n) => el("tr", {}, cell("", el("a", { href: `#run-${n}` }, run.root)), cell("num", el("b", {}, percent(run.ett_percent))),
      cell("bar-cell", plot((svg, width) => sumBar(svg, run, width))), cell("num", seconds(run.wall_s)),
      cell("num", count(run.attempts.length)), cell("num", count(run.failures)), cell("num", count(run.preemptions)), cell("num", seconds(run.time_to_start_s)),
      cell("num", seconds(run.time_to_recover_s)), cell("num", count(run.batches_repeated)),
      cell("", most(run) ? `${areaName(most(run).area)}, ${points(most(run).points)} points` : "–"))), "Runs"))];
}

function openTarget() {
  const node = /^#run-\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1));
  if (node && node.tagName === "DETAILS") node.open = true;
}

function build() {
  const runs = DATA.runs, main = document.getElementById("main");
  document.getElementById("roots").textContent = runs.length === 1 ? runs[0].root : `${runs.length} runs`;
  if (runs.length === 1) main.append(el("section", { class: "run", id: "run-0" }, runParts(runs[0], 0)));
  else {
    main.append(...fleet(runs), ...runs.map((run, n) => {
      const node = folded(el("h2", {}, run.root, ` · ${percent(run.ett_percent)}`), () => [el("div", { class: "run" }, runParts(run, n))]);
      node.id = `run-${n}`;
      return node;
    }));
  }
  drawAll();
  addEventListener("resize", drawAll);
  addEventListener("hashchange", openTarget);
  openTarget();
}

build();
