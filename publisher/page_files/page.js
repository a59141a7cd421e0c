// The status page. Text of the registry may be hostile: it only ever becomes text nodes.

import { drawBars } from "/plot.js";
import { ago, bytes, count, el, figure, seconds, setClock, when } from "/words.js";

const REFRESH_MS = 2000, PATIENCE_MS = 15000;
const $ = id => document.getElementById(id);
const state = { found: null, picked: pickedInAddress(), readAt: 0, failed: false };
const drawn = new Map();

// -- drawing: a part is drawn again only when what it shows has changed -----------------------

function draw(id, data, build) {
  const node = $(id), key = JSON.stringify(data), chosen = getSelection();
  if (drawn.get(id) === key) return;
  if (!chosen.isCollapsed && node.contains(chosen.anchorNode)) return; // somebody is copying text
  drawn.set(id, key);
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  const scrolled = node.scrollTop;
  node.replaceChildren(...[build()].flat());
  node.scrollTop = scrolled;
  if (focused) node.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
}

function table(kind, heads, rows) {
  return el("table", { class: kind },
    el("thead", {}, el("tr", {}, heads.map(([name, kind]) => el("th", { class: kind, scope: "col" }, name)))),
    el("tbody", {}, rows));
}

const cell = (kind, ...children) => el("td", { class: kind }, ...children);
const badge = (kind, text) => el("span", { class: `badge ${kind}` }, text);
const empty = text => el("p", { class: "empty" }, text);

function render() {
  const found = state.found;
  if (!found) return;
  const newest = found.published[0];
  $("model").textContent = newest && newest.model ? newest.model : "";
  $("registry").textContent = found.registry;
  const chosen = chosenVersion(found);
  draw("cards", [found.live, found.canary, found.newest_commit, found.lease, found.refused, found.versions.length, found.pins.length],
    () => cards(found));
  draw("versions", [found.published, found.live?.version, found.canary?.version, found.pins, chosen],
    () => versions(found, chosen));
  draw("chosen", [found.published.find(p => p.version === chosen), found.pins, labels(found, chosen)],
    () => details(found, chosen));
  draw("history", found.history, () => history(found));
  draw("quarantine", found.refused, () => quarantine(found));
  plots(found, chosen);
}

function cards(found) {
  return [standing("live", "Live", found.live, el("button", {
    id: "open-rollback", "data-focus": "rollback", class: "gap", onclick: openRollback,
    disabled: !found.live || !targets(found).length,
  }, "Roll back…")),
  standing("canary", "Canary", found.canary, found.canary && el("button", {
    id: "open-promote", "data-focus": "promote", class: "gap", onclick: openPromote,
  }, "Promote…")),
  newest(found), freshness(found), publisher(found)];
}

function standing(kind, title, at, button) {
  if (!at) {
    const text = kind === "live" ? "Nothing is live yet" : "No version is on trial";
    return el("div", { class: `card none`, id: `card-${kind}` }, el("h2", {}, title),
      el("div", { class: "big" }, "none"), el("p", { class: "muted" }, text));
  }
  return el("div", { class: `card ${kind}`, id: `card-${kind}` }, el("h2", {}, title),
    el("div", { class: "big" }, `v${at.version}`),
    el("p", {}, `step ${count(at.step)}`, at.since_s !== null && " · ", at.since_s !== null && when(at.since_s)),
    el("p", { class: "muted" }, at.who, at.why ? `: ${at.why}` : ""), button);
}

function newest(found) {
  const commit = found.newest_commit;
  if (!commit) {
    return el("div", { class: "card none" }, el("h2", {}, "Newest commit"),
      el("div", { class: "big" }, "none"), el("p", { class: "muted" }, "The trainer has saved nothing yet"));
  }
  const refused = found.refused.find(r => r.step === commit.step && r.epoch === commit.epoch);
  const told = commit.version !== null ? badge("passed", `published as v${commit.version}`)
    : refused ? badge("failed", `refused by ${refused.gate}`) : badge("", "not published yet");
  return el("div", { class: "card", id: "card-newest" }, el("h2", {}, "Newest commit"),
    el("div", { class: "big" }, count(commit.step)),
    el("p", {}, `step, epoch ${commit.epoch}`, commit.committed_at_s !== null && " · ",
      commit.committed_at_s !== null && when(commit.committed_at_s)),
    el("p", {}, told));
}

function pairs(list) {
  return el("dl", {}, list.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function freshness(found) {
  const fresh = found.live?.freshness;
  return el("div", { class: "card", id: "card-freshness" }, el("h2", {}, "Freshness of live"), pairs([
    ["commit → live", seconds(fresh?.commit_to_live_s)],
    ["commit → answer", seconds(fresh?.commit_to_answer_s)],
    ["event → live", seconds(fresh?.event_to_live_s)],
    ["event → answer", seconds(fresh?.event_to_answer_s)],
    ["hosts", count(fresh?.hosts.length)],
  ]));
}

function publisher(found) {
  const lease = found.lease;
  return el("div", { class: "card", id: "card-lease" }, el("h2", {}, "Publisher"), pairs([
    ["lease", lease?.problem ? "damaged" : lease ? `epoch ${lease.epoch}${lease.released ? ", released" : ""}` : "none"],
    ["since", lease ? when(lease.since_s) : "–"],
    ["versions", count(found.versions.length)],
    ["pinned", count(found.pins.length)],
    ["refused commits", count(found.refused.length)],
  ]), lease && el("p", { class: "muted" }, lease.problem || lease.owner));
}

function labels(found, version) {
  const all = [];
  if (found.live?.version === version) all.push("live");
  if (found.canary?.version === version) all.push("canary");
  if (found.pins.some(p => p.version === version)) all.push("pinned");
  return all;
}

const badges = (found, version) => labels(found, version).flatMap(l => [" ", badge(l, l)]);

function versions(found, chosen) {
  if (!found.published.length) return empty("No version is published yet.");
  return table("", [["Version"], ["Step", "num"], ["Published"], ["Size", "num mid"], ["Took", "num wide"], ["To live", "num wide"], ["Gates", "num"]],
    found.published.map(p => {
      const gates = p.gates || [], good = gates.filter(g => g.passed).length;
      return el("tr", { class: p.version === chosen && "chosen", onclick: () => pick(p.version) },
        cell("keep", el("button", { class: "pick", "data-focus": `v${p.version}`, "aria-pressed": String(p.version === chosen) }, `v${p.version}`),
          badges(found, p.version)),
        p.problem ? el("td", { colspan: 6 }, p.problem) : [
          cell("num", count(p.step)), cell("keep", when(p.published_at_s)), cell("num mid", bytes(p.size_bytes)),
          cell("num wide", seconds(p.publish_s)), cell("num wide", seconds(p.freshness.commit_to_live_s)),
          cell("num", `${good}/${gates.length}`)]);
    }));
}

function details(found, chosen) {
  const p = found.published.find(v => v.version === chosen);
  if (!p) return [el("h2", {}, "Gates"), empty("Choose a version.")];
  const head = el("h2", {}, `Version ${p.version}`, el("span", {}, badges(found, p.version)));
  if (p.problem) return [head, el("p", {}, p.problem)];
  const pin = found.pins.find(q => q.version === p.version);
  const fresh = p.freshness;
  return [head,
    el("p", { class: "muted" }, `step ${count(p.step)}, epoch ${p.epoch} · ${bytes(p.size_bytes)} · published `,
      when(p.published_at_s), ` by ${p.published_by}`, p.parent !== null ? ` · parent v${p.parent}` : "",
      pin ? ` · pinned ${pin.problem || `by ${pin.who}: ${pin.why}`}` : ""),
    table("stack", [["Gate"], ["Value", "num"], ["Limit", "num"], ["Found"]], p.gates.map(g => el("tr", {},
      cell("keep", badge(g.passed ? "passed" : "failed", g.passed ? "passed" : "failed"), ` ${g.name}`),
      cell("num", figure(g.value)), cell("num", figure(g.threshold)), cell("", g.detail)))),
    el("h3", {}, "First answers"),
    fresh.hosts.length ? table("stack", [["Host"], ["Commit → answer", "num"], ["Event → answer", "num"], ["At"]], fresh.hosts.map(h => el("tr", {},
      cell("", h.host, h.at_start && [" ", badge("", "loaded at its start")]),
      cell("num", seconds(h.commit_to_answer_s)), cell("num", seconds(h.event_to_answer_s)),
      cell("keep", when(h.first_answered_at_s))))) : empty("No host has answered from this version."),
  ];
}

function history(found) {
  if (!found.history.length) return empty("No version was live yet.");
  return table("stack", [["When"], ["Move"], ["Version", "num"], ["Who and why"]], found.history.map(m => el("tr", {},
    cell("keep", when(m.at_s)), cell("keep", badge(m.kind, m.kind)),
    cell("num", m.kind === "canary" ? `v${m.to_version}` : `${m.from_version === null ? "–" : `v${m.from_version}`} → v${m.to_version}`),
    cell("", m.who, m.why ? el("span", { class: "muted" }, ` · ${m.why}`) : null))));
}

function quarantine(found) {
  if (!found.refused.length) return empty("No commit was refused.");
  return table("stack", [["Step", "num"], ["Gate"], ["Tries", "num"], ["Reason"]], [...found.refused].sort((a, b) => b.at_s - a.at_s).map(r => el("tr", {},
    cell("num", count(r.step)), cell("keep", badge("failed", r.gate)), cell("num", count(r.attempts)),
    cell("", el("span", { class: "reason" }, r.reason), el("span", { class: "muted" }, when(r.at_s))))));
}

function plots(found, chosen) {
  const shown = found.published.filter(p => !p.problem).slice(0, 40).reverse();
  const bars = of => shown.map(p => ({ version: p.version, value: of(p), kind: labels(found, p.version).join(" ") }));
  const big = Math.max(...shown.map(p => p.size_bytes), 1);
  const power = Math.min(4, Math.floor(Math.log2(big) / 10));
  const size = { divide: 1024 ** power, name: ["B", "KiB", "MiB", "GiB", "TiB"][power], say: bytes };
  const time = all => {
    const most = Math.max(...all.map(b => b.value || 0));
    return most < 1 ? { divide: 0.001, name: "ms", say: seconds } : most < 300 ? { divide: 1, name: "s", say: seconds }
      : { divide: 60, name: "min", say: seconds };
  };
  const took = bars(p => p.publish_s), fresh = bars(p => p.freshness.commit_to_live_s);
  for (const [id, all, unit] of [["plot-size", bars(p => p.size_bytes), size], ["plot-time", took, time(took)], ["plot-fresh", fresh, time(fresh)]]) {
    const key = JSON.stringify([all, chosen, $(id).clientWidth]);
    if (drawn.get(id) === key) continue;
    drawn.set(id, key);
    drawBars($(id), all, unit, chosen, pick);
  }
}

// -- the chosen version ---------------------------------------------------------------------

function pickedInAddress() {
  const m = /^#v(\d+)$/.exec(location.hash);
  return m ? Number(m[1]) : null;
}

function chosenVersion(found) {
  return state.picked ?? found.live?.version ?? found.published[0]?.version ?? null;
}

function pick(version) {
  state.picked = version;
  window.history.replaceState(null, "", `#v${version}`);
  render();
}

// -- roll back and promote ------------------------------------------------------------------

const targets = found => found.published.filter(p => !p.problem && p.version !== found.live?.version);
let seen = null;

function openRollback() {
  const found = state.found, select = $("rollback-to");
  seen = found.live.version;
  $("rollback-from").textContent = seen;
  select.replaceChildren(...targets(found).map(p => el("option", { value: p.version }, `version ${p.version} (step ${p.step})`)));
  const back = found.rollback_to ?? targets(found).find(p => p.version < seen)?.version;
  if (back) select.value = back;
  openDialog("rollback");
}

function openPromote() {
  seen = state.found.live ? state.found.live.version : null;
  $("promote-version").textContent = state.found.canary.version;
  openDialog("promote");
}

function openDialog(id) {
  $(`${id}-error`).textContent = "";
  $(`${id}-who`).value = localStorage.getItem("who") || "";
  $(`${id}-why`).value = "";
  $(id).showModal();
}

async function move(id, body) {
  const who = $(`${id}-who`).value, why = $(`${id}-why`).value;
  localStorage.setItem("who", who);
  $(`${id}-go`).disabled = true;
  try {
    const answer = await ask(`/api/${id}`, {
      method: "POST", headers: { "Content-Type": "application/json", "X-Sidestage": "page" },
      body: JSON.stringify({ ...body, seen, who, why }),
    });
    $(id).close();
    $("done").textContent = `Version ${answer.move.to_version} is live.`;
    $("done").hidden = false;
    setTimeout(() => { $("done").hidden = true; }, 6000);
    await refresh();
  } catch (e) {
    $(`${id}-error`).textContent = e.message;
  } finally {
    $(`${id}-go`).disabled = false;
  }
}

function onSubmit(id, act) {
  $(id).querySelector("form").addEventListener("submit", event => { event.preventDefault(); act(); });
  $(id).querySelector("[data-close]")?.addEventListener("click", () => $(id).close());
}

onSubmit("rollback", () => move("rollback", { to: Number($("rollback-to").value) }));
onSubmit("promote", () => move("promote", { version: state.found.canary?.version ?? 0 }));
onSubmit("token", () => {
  sessionStorage.setItem("token", $("token-text").value.trim());
  $("token").close();
  refresh();
});

// -- talking to the publisher ---------------------------------------------------------------

async function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  const body = await response.json();
  if (response.ok) return body;
  if (response.status === 401 && !$("token").open) {
    $("token-error").textContent = token ? "That token is wrong." : "";
    $("token").showModal();
  }
  throw new Error(body.error);
}

async function refresh() {
  try {
    const found = await ask("/api/status");
    state.found = found;
    setClock(found.now_s);
    state.readAt = Date.now();
    state.failed = false;
    $("trouble").hidden = true;
    render();
  } catch (e) {
    state.failed = true;
    $("trouble").textContent = e.name === "TypeError" || e.name === "TimeoutError"
      ? "The publisher doesn't answer. What is shown below may be out of date." : e.message;
    $("trouble").hidden = false;
  }
  tick();
}

function tick() {
  const age = state.readAt ? Math.round((Date.now() - state.readAt) / 1000) : null;
  const pulse = $("pulse"), told = age === null ? "connecting" : age < 4 ? "up to date" : `read ${age} s ago`;
  if (pulse.textContent !== told) pulse.textContent = told;
  pulse.className = state.failed ? "bad" : age !== null && age < 10 ? "ok" : "";
  for (const node of document.querySelectorAll("time")) {
    const text = ago(Number(node.dataset.at));
    if (node.textContent !== text) node.textContent = text;
  }
}

async function loop() {
  if (!document.hidden) await refresh();
  setTimeout(loop, REFRESH_MS);
}

setInterval(tick, 1000);
addEventListener("resize", render);
addEventListener("hashchange", () => { state.picked = pickedInAddress(); render(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
loop();
