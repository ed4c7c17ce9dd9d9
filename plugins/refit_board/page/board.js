// Asks the server every few seconds and shows what it says; a rollback asks the person first.

import { alerts, jobs, line, make } from "./view.js";

const EVERY = 5000;
const $ = (id) => document.getElementById(id);
let shownBefore = "";

async function refresh() {
  let board;
  try {
    const answer = await fetch("api/board", { headers: { accept: "application/json" } });
    if (answer.status === 401) return say("Your session has ended: log in again.");
    if (!answer.ok) return say(`The server says ${answer.status}.`);
    board = await answer.json();
  } catch {
    return say("The server does not answer.");
  }
  say(`as of ${new Date().toLocaleTimeString()}`);
  const now = JSON.stringify(board);
  if (now === shownBefore) return undefined; // do not take a selection or a scroll position away for nothing
  shownBefore = now;
  $("faults").hidden = board.faults.length === 0;
  $("faults").replaceChildren(...board.faults.map((fault) => make("p", {}, fault)));
  $("lines").replaceChildren(...board.lines.map((data) => line(data, askToRollBack)));
  if (!board.lines.length) $("lines").append(make("p", { class: "quiet" }, "No line that you may see."));
  $("jobs").replaceChildren(jobs(board.jobs, board.devices));
  $("alerts").replaceChildren(alerts(board.alerts));
  return undefined;
}

function say(text) {
  $("fresh").textContent = text;
}

function askToRollBack(data) {
  const moving = data.rollout && data.rollout.state === "running";
  const previous = data.serving && data.serving.previous ? data.serving.previous.slice(0, 8) : "";
  $("confirm-line").textContent = data.title;
  $("confirm-what").textContent = moving
    ? "The running rollout is taken back: all users return to the champion at once."
    : `All users go back to the previous model, ${previous}.`;
  $("confirm-reason").value = "";
  $("confirm-answer").textContent = "";
  $("confirm-no").onclick = () => $("confirm").close();
  $("confirm-yes").onclick = () => rollBack(data.name);
  $("confirm").showModal();
}

async function rollBack(name) {
  const reason = $("confirm-reason");
  if (!reason.reportValidity()) return;
  $("confirm-yes").disabled = true;
  try {
    const answer = await fetch(`api/lines/${encodeURIComponent(name)}/rollback`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ reason: reason.value }),
    });
    if (answer.ok) {
      $("confirm").close();
      await refresh();
    } else {
      const said = await answer.json().catch(() => ({}));
      $("confirm-answer").textContent = typeof said.detail === "string" ? said.detail : `The server says ${answer.status}.`;
    }
  } catch {
    $("confirm-answer").textContent = "The server does not answer.";
  } finally {
    $("confirm-yes").disabled = false;
  }
}

refresh();
setInterval(refresh, EVERY);
