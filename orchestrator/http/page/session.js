// What is known of one session: its tokens with their fates, its verdicts, its figures. No page in it.

export class Session {
  constructor() {
    this.points = []; // the released text, by code points
    this.tokens = []; // {position, id, outcome, end, logprob, verdict, atUs}
    this.guess = "";
    this.proposed = [];
    this.judged = [];
    this.plans = [];
    this.places = []; // by place in the window: {tested, accepted}
    this.counts = { accepted: 0, recovered: 0, bonus: 0, direct: 0 };
    this.startedUs = null;
    this.firstUs = null;
    this.lastUs = null;
    this.finished = null;
    this.promptTokens = 0;
    this.forwards = 0;
  }

  take(event) {
    switch (event.type) {
      case "started":
        this.startedUs = event.at_us;
        this.promptTokens = event.prompt_tokens;
        break;
      case "chunk":
        this.#extend(event);
        break;
      case "provisional":
        this.guess = event.text;
        break;
      case "proposed":
        this.proposed.push({ ...event, fate: "pending" });
        break;
      case "judged":
        this.#judge(event);
        break;
      case "finished":
        this.points.push(...event.text);
        this.guess = "";
        this.finished = event;
        break;
    }
  }

  #extend(chunk) {
    this.points.push(...chunk.text);
    this.guess = "";
    this.firstUs ??= chunk.at_us;
    this.lastUs = chunk.at_us;
    chunk.tokens.forEach((id, i) => {
      const position = chunk.position + i;
      const verdict = this.judged.findLast((one) => one.position <= position);
      const outcome = chunk.outcomes[i];
      this.counts[outcome] += 1;
      this.tokens.push({ position, id, outcome, end: chunk.ends[i], logprob: chunk.logprobs[i], verdict, atUs: chunk.at_us });
    });
  }

  #judge(verdict) {
    this.judged.push(verdict);
    this.forwards += 1;
    if (verdict.plan && verdict.plan !== this.plans.at(-1)?.plan) this.plans.push({ atUs: verdict.at_us, plan: verdict.plan });
    const accepted = verdict.outcomes.filter((one) => one === "accepted").length;
    const tested = Math.max(accepted, Math.min(verdict.tested, accepted + 1));
    for (let place = 0; place < tested; place++) {
      const known = (this.places[place] ??= { tested: 0, accepted: 0 });
      known.tested += 1;
      known.accepted += place < accepted ? 1 : 0;
    }
    this.#settle(verdict);
  }

  // Proposals whose tokens are decided by now held or did not.
  #settle(verdict) {
    const decided = new Map(verdict.tokens.map((token, i) => [verdict.position + i, token]));
    for (const one of this.proposed) {
      if (one.fate !== "pending") continue;
      const from = one.base + one.offset;
      const fates = one.tokens.map((token, i) => (decided.has(from + i) ? decided.get(from + i) === token : null));
      if (fates.includes(false)) this.#refuse(one);
      else if (fates.includes(true)) one.fate = "accepted";
      else if (from + one.tokens.length <= verdict.position) one.fate = "late";
    }
  }

  #refuse(proposal) {
    for (const one of this.proposed) {
      const same = one.source === proposal.source && one.chain === proposal.chain && one.offset >= proposal.offset;
      if (same && one.fate === "pending") one.fate = "refused";
    }
  }

  get tokensPerSecond() {
    const us = this.lastUs - this.startedUs;
    return us > 0 ? (this.tokens.length * 1e6) / us : 0;
  }

  get tokensPerForward() {
    const decided = this.judged.reduce((sum, one) => sum + one.tokens.length, 0);
    return this.forwards ? decided / this.forwards : 0;
  }

  // Tokens per second around each of `count` instants, over a window of its own width.
  rates(count = 60) {
    if (this.tokens.length < 2) return [];
    const begin = this.startedUs, span = Math.max(1, this.lastUs - begin), width = Math.max(span / 12, 50_000);
    return Array.from({ length: count }, (_, i) => {
      const until = begin + (span * (i + 1)) / count, from = Math.max(begin, until - width);
      const within = this.tokens.filter((token) => token.atUs > from && token.atUs <= until).length;
      return { x: (until - begin) / 1e6, y: (within * 1e6) / (until - from) };
    });
  }
}
