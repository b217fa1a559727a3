// What runs: verifiers, drafters and the log, and the caller's own sessions. Asked for again and again.

import { Refused, status } from "./stream.js";

const STATUS_MS = 2000;
// Whether what the page says was said here, and is to be taken back when all is well.
let ours = true;

// of: an element by its id. busy: whether the page has something else to say. say: says it.
export async function look(of, busy, say) {
  if (!document.hidden) await asked(of, busy, say);
  setTimeout(() => look(of, busy, say), STATUS_MS);
}

async function asked(of, busy, say) {
  try {
    const known = await status(of("key").value);
    show(of, known);
    const trouble = known.unready;
    if (!busy() && (trouble || ours)) say(trouble ?? "ready", trouble ? "bad" : "");
    ours = Boolean(trouble);
  } catch (error) {
    if (busy()) return;
    ours = true;
    say(error instanceof Refused ? error.message : "the orchestrator does not answer", "bad");
  }
}

function show(of, known) {
  of("served").textContent = known.target.model;
  of("served").title = `${known.target.vocabulary} tokens, contexts of ${known.context}`;
  of("parts").replaceChildren(
    ...known.verifiers.map((one) => part("verifier", one, one.draining ? "draining" : "up")),
    ...known.drafters.map((one) => part(`drafter ${one.model}`, one, "up")),
    log(known),
  );
  of("sessions").replaceChildren(...known.sessions.map((one) => row([one.id, one.state, `${one.tokens}`, one.plan])));
  of("idle").hidden = known.sessions.length > 0;
}

function part(name, one, state) {
  const sessions = one.slots ? `${one.sessions} of ${one.slots}` : `${one.sessions}`;
  const made = row([name, one.up ? state : "down", sessions, milliseconds(one.round_trip_us), milliseconds(one.forward_us)]);
  made.className = one.up ? state : "down";
  return made;
}

function log({ durability, log_trouble }) {
  const made = row(["session log", log_trouble || durability, "", "", ""]);
  made.className = log_trouble ? "down" : "up";
  return made;
}

function milliseconds(us) {
  return us ? `${(us / 1000).toFixed(1)} ms` : "";
}

function row(values) {
  const made = document.createElement("tr");
  for (const value of values) made.insertCell().textContent = value;
  return made;
}
