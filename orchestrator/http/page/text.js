// Shows a session's text token by token; one token at a time is current, by pointer or by arrow keys.

export class TokenText {
  constructor(article, inspect) {
    this.pre = article.querySelector(".tokens");
    this.speed = article.querySelector(".speed");
    this.inspect = inspect;
    this.pre.addEventListener("pointerover", (event) => this.#point(event.target));
    this.pre.addEventListener("click", (event) => this.#point(event.target));
    this.pre.addEventListener("keydown", (event) => this.#move(event));
    this.clear();
  }

  clear() {
    this.pre.replaceChildren();
    this.speed.value = "";
    this.spans = [];
    this.settled = 0;
    this.current = -1;
  }

  show(session) {
    this.session = session;
    const follow = this.pre.scrollTop + this.pre.clientHeight >= this.pre.scrollHeight - 8;
    for (let i = this.settled; i < session.tokens.length; i++) this.#token(i, session);
    while (this.settled < session.tokens.length && session.tokens[this.settled].end <= session.points.length) this.settled++;
    this.speed.value = session.lastUs ? `${session.tokensPerSecond.toFixed(0)} tokens/s` : "";
    if (follow) this.pre.scrollTop = this.pre.scrollHeight;
  }

  #token(i, session) {
    const token = session.tokens[i], begin = i ? session.tokens[i - 1].end : 0;
    const end = session.finished ? Math.min(token.end, session.finished.text_length) : token.end;
    const text = session.points.slice(begin, Math.max(begin, end)).join("");
    if (!this.spans[i]) {
      this.spans[i] = document.createElement("span");
      this.spans[i].className = `${token.outcome} new`;
      this.spans[i].dataset.index = i;
      this.pre.append(this.spans[i]);
    }
    this.spans[i].textContent = text;
  }

  #point(target) {
    if (target.dataset?.index !== undefined) this.#select(Number(target.dataset.index));
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !this.spans.length) return;
    event.preventDefault();
    this.#select(Math.min(this.spans.length - 1, Math.max(0, this.current + step)));
    this.spans[this.current].scrollIntoView({ block: "nearest" });
  }

  #select(index) {
    this.spans[this.current]?.classList.remove("current");
    this.current = index;
    this.spans[index].classList.add("current");
    this.inspect(this.session, index, this.spans[index].textContent);
  }
}

const WHY = {
  accepted: "a draft token, accepted",
  recovered: "the target's own, instead of a draft token that it refused",
  bonus: "the target's own, behind an accepted run",
  direct: "the target's own, with no draft token to test",
};

// What is to be told of a token: its text and kind, and [name, value] of the rest.
export function explained(session, index, text) {
  const token = session.tokens[index], facts = [["position", `${token.position}`]];
  if (token.logprob !== undefined) facts.push(["probability", percent(Math.exp(token.logprob))]);
  if (token.verdict) facts.push(["chain", source(token)], ["verdict", judged(token.verdict)]);
  facts.push(["id", `${token.id}`]);
  return { text: JSON.stringify(text), outcome: token.outcome, why: WHY[token.outcome], facts };
}

function judged(verdict) {
  const forward = `in a forward of ${(verdict.forward_us / 1000).toFixed(1)} ms`;
  const left = verdict.tested - verdict.reached, untested = left ? ` (${left} more were not tested)` : "";
  return verdict.tested ? `${verdict.accepted} of ${verdict.reached} tested accepted${untested}, ${forward}` : `one token, ${forward}`;
}

// The verifier's own sources.
const OWN = { NGRAM: "the text itself (n-grams)", PREDICTION: "the request's prediction", HEAD: "a head beside the target" };

function source({ outcome, verdict: { tested, kind, source, chain } }) {
  if (!tested) return outcome === "accepted" || outcome === "recovered" ? "one that arrived during the forward" : "none";
  if (kind in OWN) return OWN[kind];
  return `${chain === null ? "one" : chain} of drafter ${source}`;
}

function percent(p) {
  return p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : `${(100 * p).toPrecision(2)} %`;
}
