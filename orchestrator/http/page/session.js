// What is known of one session: its tokens with their fates, its verdicts, its figures. No page in it.

// Clocks that differ by more than they did before are another verifier's.
const OTHER_CLOCK_US = 5e6;
// Whoever proposes draft tokens, by the name on the wire.
export const SOURCES = { DRAFTER: "drafters", NGRAM: "n-grams", PREDICTION: "the request's prediction", HEAD: "heads" };
const isJudged = (outcome) => outcome === "accepted" || outcome === "recovered";

export class Session {
  constructor() {
    this.points = []; // the released text, by code points
    this.tokens = []; // {position, id, outcome, end, logprob, verdict, atUs}
    // As told, and of each token: `fates` (pending, accepted, waiting, refused, pruned or late), `positions`, `parents`,
    // and `ranks` among those of the same parent.
    this.proposed = [];
    this.trees = new Map(); // of each source the newest: {chain, positions, children, gone}, by number; gone: void, with its fate
    this.decided = new Map(); // tokens by position
    this.judged = []; // as told, with `chain`, and `clock`, which all verdicts of one verifier share
    this.most = 0; // tokens of one verdict
    this.plans = [];
    this.places = []; // by place in the window: {tested, accepted}
    // What became of draft tokens, and the forwards that were saved, by who proposed them.
    this.sources = Object.fromEntries(Object.keys(SOURCES).map((kind) => [kind, { tested: 0, accepted: 0, saved: 0 }]));
    this.corrections = new Map(); // by position, of each token in place of a drafter's: whether it was found waiting
    this.counts = { accepted: 0, recovered: 0, bonus: 0, direct: 0 };
    this.startedUs = null;
    this.firstUs = null;
    this.lastUs = null;
    this.finished = null;
    this.promptTokens = 0;
    this.settled = 0; // proposals before this one have no pending token
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
      case "proposed":
        this.#propose(event);
        break;
      case "judged":
        this.#judge(event);
        break;
      case "finished":
        this.points.push(...event.text);
        this.finished = event;
        break;
    }
  }

  // A chain is the tree in which every token stands behind the one before it. -1 is the text before the base.
  #propose(told) {
    let tree = this.trees.get(told.source);
    if (tree?.chain !== told.chain) {
      tree = { chain: told.chain, positions: new Map([[-1, told.base - 1]]), children: new Map(), gone: new Map() };
      this.trees.set(told.source, tree);
    }
    const parents = told.tokens.map((_, i) => told.parents[i] ?? told.offset + i - 1), positions = [], ranks = [], fates = [];
    parents.forEach((parent, i) => {
      const number = told.offset + i, siblings = tree.children.get(parent) ?? 0;
      positions.push((tree.positions.get(parent) ?? told.base + parent) + 1);
      ranks.push(siblings);
      tree.positions.set(number, positions[i]);
      tree.children.set(parent, siblings + 1);
      const decided = this.decided.get(positions[i]), late = decided !== undefined;
      fates.push(tree.gone.get(parent) ?? (late ? "late" : "pending"));
      if (tree.gone.has(parent) || (late && decided !== told.tokens[i])) tree.gone.set(number, fates[i]);
    });
    this.proposed.push({ ...told, parents, positions, ranks, fates });
  }

  #extend(chunk) {
    this.points.push(...chunk.text);
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

  #judge(told) {
    // Behind a refused token, and behind the text's end, nothing was tested; one behind the window came during the forward.
    const reached = told.outcomes.slice(0, told.tested).filter(isJudged), late = told.outcomes.slice(told.tested).filter(isJudged);
    const accepted = reached.filter((one) => one === "accepted").length;
    const verdict = { ...told, accepted, reached: reached.length, clock: this.#clockOf(told), chain: null };
    this.#count(verdict.kind || "DRAFTER", reached, verdict.tested ? verdict.tokens.length - 1 : 0);
    this.#count("DRAFTER", late, 0);
    if (verdict.kind === "DRAFTER") verdict.chain = this.#chainOf(verdict);
    this.judged.push(verdict);
    verdict.tokens.forEach((token, i) => this.decided.set(verdict.position + i, token));
    this.most = Math.max(this.most, verdict.tokens.length);
    if (verdict.plan && verdict.plan !== this.plans.at(-1)?.plan) this.plans.push({ atUs: verdict.at_us, plan: verdict.plan });
    for (let place = 0; place < verdict.reached; place++) {
      const known = (this.places[place] ??= { tested: 0, accepted: 0 });
      known.tested += 1;
      known.accepted += place < verdict.accepted ? 1 : 0;
    }
    this.#settle(verdict);
  }

  #count(kind, outcomes, saved) {
    const source = this.sources[kind];
    if (!source) return;
    source.tested += outcomes.length;
    source.accepted += outcomes.filter((one) => one === "accepted").length;
    source.saved += saved;
  }

  // How far the verifier's clock is behind ours, by the quickest of its verdicts: the others waited somewhere.
  #clockOf(verdict) {
    const behind = verdict.at_us - verdict.ended_us, known = this.judged.at(-1)?.clock;
    if (!known || Math.abs(behind - known.behind) > OTHER_CLOCK_US) return { behind };
    known.behind = Math.min(known.behind, behind);
    return known;
  }

  // The chain that the window was of: the newest one of its source that holds what was accepted, and reaches the window.
  #chainOf(verdict) {
    const wrong = new Set();
    for (const one of this.proposed.toReversed()) {
      const within = one.positions.some((at) => at >= verdict.position && at < verdict.position + verdict.tested);
      if (one.source !== verdict.source || wrong.has(one.chain) || !within) continue;
      const differs = verdict.tokens.slice(0, verdict.accepted).some((token, i) => {
        const there = one.tokens.filter((_, k) => one.positions[k] === verdict.position + i);
        return there.length > 0 && !there.includes(token);
      });
      if (!differs) return one.chain;
      wrong.add(one.chain);
    }
    return null;
  }

  // Of proposals what becomes of each token once its position is decided.
  #settle(verdict) {
    const end = endOf(verdict);
    verdict.outcomes.forEach((outcome, i) => {
      if (outcome === "recovered" && verdict.kind === "DRAFTER") this.corrections.set(verdict.position + i, false);
    });
    for (const one of this.proposed.slice(this.settled)) {
      one.tokens.forEach((token, i) => {
        const at = one.positions[i] - verdict.position;
        if (one.fates[i] !== "pending" || one.positions[i] >= end) return;
        if (at < 0) one.fates[i] = "late";
        else if (verdict.tokens[at] !== token) this.#prune(one, i, one.ranks[i] ? "pruned" : "refused");
        else if (verdict.outcomes[at] === "accepted") one.fates[i] = "accepted";
        else {
          one.fates[i] = one.ranks[i] ? "waiting" : "late";
          if (one.ranks[i] && this.corrections.has(one.positions[i])) this.corrections.set(one.positions[i], true);
        }
      });
    }
    while (this.settled < this.proposed.length && !this.proposed[this.settled].fates.includes("pending")) this.settled++;
  }

  // What descends from a token that was not decided is void with it. A parent comes before its children.
  #prune(proposal, i, fate) {
    const tree = this.trees.get(proposal.source), gone = tree.chain === proposal.chain ? tree.gone : new Map();
    gone.set(proposal.offset + i, fate);
    proposal.fates[i] = fate;
    for (const one of this.proposed.slice(this.settled)) {
      if (one.source !== proposal.source || one.chain !== proposal.chain) continue;
      one.parents.forEach((parent, k) => {
        if (!gone.has(parent)) return;
        gone.set(one.offset + k, gone.get(parent));
        if (one.fates[k] === "pending") one.fates[k] = fate;
      });
    }
  }

  get tokensPerSecond() {
    const us = this.lastUs - this.startedUs;
    return us > 0 ? (this.tokens.length * 1e6) / us : 0;
  }

  get saved() {
    return Object.values(this.sources).reduce((sum, one) => sum + one.saved, 0);
  }

  get tokensPerForward() {
    const decided = this.judged.reduce((sum, one) => sum + one.tokens.length, 0);
    return this.judged.length ? decided / this.judged.length : 0;
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

// When a verdict's forward ended, by the orchestrator's clock: a message takes half of the round trip.
export function endedUs(verdict) {
  const taken = verdict.round_trip_us / 2;
  return verdict.ended_us ? verdict.ended_us + verdict.clock.behind - taken : verdict.at_us - taken;
}

// The position behind what a verdict decided.
export function endOf(verdict) {
  return verdict.position + verdict.tokens.length;
}

// How a verdict's plan begins: stream, lockstep or off; "" where nothing drafts.
export function discipline(verdict) {
  return verdict.plan.split(":")[0];
}
