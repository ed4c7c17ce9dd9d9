// How the board's document becomes a page. Text is only ever set as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function link(href, text) {
  // Only addresses of this server or http(s): an address from the data never runs a script.
  const safe = /^(https?:\/\/|\/)/.test(href || "");
  return safe ? make("a", { href, target: "_blank", rel: "noopener", onclick: openOutside }, text) : document.createTextNode(text);
}

// Airflow shows the page in a frame that may open no window of its own: so the page around it opens the link.
function openOutside(event) {
  if (window.parent === window) return;
  event.preventDefault();
  const outside = window.parent.document.createElement("a");
  Object.assign(outside, { href: event.currentTarget.href, target: "_blank", rel: "noopener" });
  outside.click();
}

const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
const points = (value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`;
export const shown = (at) => (at ? new Date(at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "");
const release = (id) => (id ? make("code", { title: id }, id.slice(0, 8)) : make("span", { class: "quiet" }, "none"));

const TONE = {
  promoted: "good", pass: "good", finished: "good", succeeded: "good", "already champion": "neutral", running: "neutral",
  "stopped at gate": "hold", hold: "hold", retrying: "hold", suspended: "hold", "rolled back": "bad", rolled_back: "bad",
  failed: "bad", fail: "bad",
};
export const tag = (text) => make("span", { class: `tag ${TONE[text] || "neutral"}` }, String(text).replace("_", " "));

export function line(data, onRollBack) {
  const serving = data.serving || {};
  const moving = data.rollout && data.rollout.state === "running";
  const canGoBack = data.can_edit && (moving || serving.previous);
  return make("section", { class: "panel", "data-line": data.name },
    make("div", { class: "line-head" },
      make("div", {},
        make("h2", {}, link(`/dags/${encodeURIComponent(data.dag_id)}`, data.title)),
        make("p", { class: "quiet" }, `${data.team} · ${data.owner}`)),
      canGoBack ? make("button", { class: "danger", onclick: () => onRollBack(data) }, "Roll back") : null),
    make("dl", { class: "serves" },
      role("Users get", serving.champion), role("Before that", serving.previous),
      moving ? role("Being tried", serving.challenger || data.rollout.candidate) : null),
    serving.champion ? split(moving ? serving.weight : 0) : make("p", { class: "quiet" }, "Nothing serves yet."),
    data.rollout ? rollout(data.rollout) : null,
    data.runs.length ? runs(data.runs) : null);
}

const role = (name, id) => make("div", {}, make("dt", {}, name), make("dd", {}, release(id)));

function split(weight) {
  const bar = make("div", { class: "split", role: "img", "aria-label": `${100 - weight} % champion, ${weight} % challenger` });
  for (const [name, share] of [["champion", 100 - weight], ["challenger", weight]]) {
    if (share <= 0) continue;
    const part = make("span", { class: name }, `${name} ${share} %`);
    part.style.flexGrow = share; // set on the object: a style attribute would be refused by the page's policy
    part.style.flexBasis = "0";
    bar.append(part);
  }
  return bar;
}

function rollout(data) {
  const item = (step) => {
    const now = data.state === "running" && step.step === data.step;
    const verdict = step.verdict === "pass" || step.verdict === "fail" ? step.verdict : now ? "now" : "";
    const words = step.verdict ? `${step.verdict}${step.why ? `: ${step.why}` : ""}` : now ? "waiting for a verdict" : "";
    return make("li", { class: verdict }, make("strong", {}, step.step === 0 ? "shadow" : `${step.share} %`),
      make("p", { title: words }, words));
  };
  return make("div", {}, make("h3", {}, "Rollout ", tag(data.state)), make("ol", { class: "steps" }, ...data.steps.map(item)));
}

function runs(rows) {
  const row = (run) => {
    const difference = run.difference;
    return make("tr", {},
      make("td", {}, shown(run.at)),
      make("td", { title: run.why || "" }, run.outcome ? tag(run.outcome) : tag(run.verdict || "running")),
      make("td", { class: "number" }, run.candidate ? percent(run.candidate.score) : "–"),
      make("td", { class: "number" }, run.champion ? percent(run.champion.score) : "–"),
      make("td", { class: "number" }, difference
        ? `${points(difference.value)} (${points(difference.low)} to ${points(difference.high)})` : "–"),
      make("td", {}, difference ? range(difference) : ""),
      make("td", {}, run.report ? link(run.report, "report") : ""));
  };
  const heads = ["when", "outcome", "candidate", "champion", "difference, points", "interval", ""];
  return make("div", {}, make("h3", {}, "Last runs"),
    make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", {}, head)))),
      make("tbody", {}, ...rows.map(row))));
}

function range({ value, low, high }) {
  const reach = Math.max(0.05, Math.abs(low), Math.abs(high)) * 1.15;
  const x = (number) => 60 + (55 * number) / reach;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 120 18");
  svg.setAttribute("class", "range");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `between ${points(low)} and ${points(high)} points`);
  const add = (kind, attributes) => {
    const shape = document.createElementNS(SVG, kind);
    for (const [name, number] of Object.entries(attributes)) shape.setAttribute(name, number);
    svg.append(shape);
  };
  add("line", { x1: 2, x2: 118, y1: 9, y2: 9 });
  add("line", { x1: 60, x2: 60, y1: 1, y2: 17, class: "zero" });
  add("line", { x1: x(low), x2: x(high), y1: 9, y2: 9, class: "span" });
  add("circle", { cx: x(value), cy: 9, r: 4.5 });
  return svg;
}

export function jobs(rows, devices) {
  if (!rows.length && !devices.length) return make("p", { class: "quiet" }, "Nothing runs.");
  const row = (job) => make("tr", {},
    make("td", {}, link(job.folder, `${job.pipeline} · ${job.kind}`)),
    make("td", {}, tag(job.state)),
    make("td", {}, job.host || "–"),
    make("td", {}, job.share === null ? "" : make("progress", { max: 1, value: job.share }),
      make("div", { class: "quiet" }, job.progress || (job.state === "failed" ? job.reason : ""))));
  const device = (card) => make("tr", {}, make("td", {}, `${card.node} · ${card.device}`),
    make("td", {}, card.job || card.release || "free"), make("td", {}, card.team || ""), make("td", {}, shown(card.from_at)));
  return make("table", {}, make("tbody", {}, ...rows.map(row), ...devices.map(device)));
}

export function alerts(rows) {
  if (!rows.length) return make("p", { class: "quiet" }, "None.");
  return make("div", {}, ...rows.map((alert) => make("div", { class: `alert ${alert.level === "dangerous" ? "dangerous" : ""}` },
    make("p", {}, alert.message),
    make("p", { class: "quiet" }, [shown(alert.at), alert.pipeline, alert.source].filter(Boolean).join(" · ")))));
}
