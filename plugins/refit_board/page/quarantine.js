// The bad records of a run: counts by source and reason, samples of the one that is chosen. Text is only ever set as text.

import { link, make, shown, tag } from "./view.js";

const $ = (id) => document.getElementById(id);
const count = (number, what) => `${number.toLocaleString()} ${what}`;
let runs = [];

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, { headers: { accept: "application/json" } });
  } catch {
    throw new Error("The server does not answer.");
  }
  if (answer.ok) return answer.json();
  if (answer.status === 401) throw new Error("Your session has ended: log in again.");
  const said = await answer.json().catch(() => ({}));
  throw new Error(typeof said.detail === "string" ? said.detail : `The server says ${answer.status}.`);
}

async function start() {
  runs = await ask("api/quarantine");
  const wanted = new URLSearchParams(location.search).get("job");
  const first = runs.find((run) => run.id === wanted) || runs[0];
  const lines = [...new Set(runs.map((run) => run.pipeline))].sort();
  $("line").replaceChildren(...lines.map((name) => make("option", { value: name }, name)));
  if (first) $("line").value = first.pipeline;
  listRuns(wanted || (first && first.id));
  $("line").addEventListener("change", () => { listRuns(); show($("run").value); });
  $("run").addEventListener("change", () => show($("run").value));
  const chosen = wanted || (first && first.id);
  if (chosen) await show(chosen);
  else {
    $("fresh").textContent = "";
    $("found").replaceChildren(make("p", { class: "quiet" }, "No run of a line that you may see had a bad record."));
  }
}

function listRuns(chosen) {
  const of = runs.filter((run) => run.pipeline === $("line").value);
  const words = (run) => `${shown(run.at)} · ${run.run_id || run.id} · ${count(run.records, "bad")}`;
  $("run").replaceChildren(...of.map((run) => make("option", { value: run.id }, words(run))));
  if (chosen && of.some((run) => run.id === chosen)) $("run").value = chosen;
}

async function show(id, group = null) {
  try {
    const only = group ? `?${new URLSearchParams({ source: group.source, kind: group.kind })}` : "";
    const job = await ask(`api/quarantine/${encodeURIComponent(id)}${only}`);
    $("fresh").textContent = "";
    $("found").replaceChildren(summary(job), kinds(job, group), samples(job, group));
  } catch (error) {
    $("fresh").textContent = error.message;
  }
}

function summary(job) {
  const total = job.folders.reduce((sum, folder) => sum + folder.records, 0);
  const places = job.folders.map((folder) => link(folder.page, `${folder.phase} folder`));
  if (job.docs) places.unshift(link(job.docs, "Data Docs"));
  return make("section", { class: "panel" },
    make("h2", {}, `${job.pipeline}: ${count(total, "bad records")} `, tag(job.state)),
    make("p", { class: "quiet" }, `${shown(job.at)} · ${job.run_id || job.id}`),
    job.state === "failed" ? make("p", { class: "refused" }, job.reason) : null,
    make("p", {}, ...places.flatMap((place, index) => (index ? [" · ", place] : [place]))));
}

function kinds(job, group) {
  const most = Math.max(1, ...job.kinds.map((row) => row.records));
  const row = (kind) => {
    const chosen = group !== null && group.source === kind.source && group.kind === kind.kind;
    const bar = make("span", { class: "bar" });
    bar.style.width = `${(100 * kind.records) / most}%`; // on the object: the page's policy refuses a style attribute
    const choose = () => show(job.id, chosen ? null : kind);
    return make("tr", { class: chosen ? "row chosen" : "row", onclick: choose },
      make("td", {}, kind.source || "all sources"),
      make("td", {}, make("button", { type: "button", "aria-pressed": String(chosen) }, kind.kind || "(no reason)")),
      make("td", { class: "number" }, kind.records.toLocaleString()),
      make("td", { class: "share" }, bar));
  };
  return make("section", { class: "panel" }, make("h2", {}, "By source and reason"),
    make("table", {}, head("source", "reason", "records", ""), make("tbody", {}, ...job.kinds.map(row))));
}

function samples(job, group) {
  const row = (bad) => make("tr", {},
    make("td", {}, `${bad.source} · ${bad.file}:${bad.line}`),
    make("td", {}, bad.reason),
    make("td", { class: "sample" }, bad.sample));
  return make("section", { class: "panel" },
    make("h2", {}, group ? `Samples: ${group.source || "all sources"}, ${group.kind}` : "Samples, some of every reason"),
    make("table", { class: "samples" }, head("where", "why", "what was found"), make("tbody", {}, ...job.samples.map(row))));
}

const head = (...names) => make("thead", {}, make("tr", {}, ...names.map((name) => make("th", {}, name))));

start().catch((error) => { $("fresh").textContent = error.message; });
