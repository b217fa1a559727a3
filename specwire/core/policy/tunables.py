"""The numbers that a verifier's policy is tuned by, those of vLLM's plugin apart.

They change how fast a text comes, not its law.

Each has its unit and its reason. Where a number came from a measurement, the comment names it: "sweep" is
`make bench-sweep`, which holds all of them together to 0.95 of the best fixed setting of each cell; "LOG" is
docs/LOG.md. Limits on memory and on what a peer may send are not here but beside what they limit: the longest window
and run-ahead, for example, are in `specwire.core.messages`, with how a drafter begins.
"""

from __future__ import annotations

# ----------------------------------------------------------------------------------------------------------------------
# What is learnt, and how fast it is forgotten.

# Share of its weight that a count of acceptance keeps with each new one. This remembers some 50 windows; a shorter
# memory chases chance (sweep).
DECAY = 0.98
# Likewise for comparisons with the text. Agreement is raised to the power of a round trip's tokens, so it must be known
# well.
AGREEMENT_DECAY = 0.99
# Weight of a new timing (a delay, a token's drafting, an overhead) in what is known of it.
TIMING_WEIGHT = 0.2
# Weight of one draft of a head in what its drafts are known to take; smaller, because the ledger charges by it.
STEP_WEIGHT = 0.05
# Weight of one step in how slow the machine is now: it is as some five steps say, which costs a text little when a
# shared machine becomes half as fast (simulated cells).
# A plain step tells more: what windows take is measured by it.
PACE_WEIGHT, PLAIN_PACE_WEIGHT = 0.2, 0.5
# Pairs of a plain step and one of another width whose median tells what that width takes, and how many it needs: a
# median bears a machine that is slow for every third step.
SEEN_STEPS, LEAST_SEEN = 9, 3
# Plain steps behind which one such pair of each width is forgotten: 600 tokens, and what was too dear may be tried.
FORGOTTEN_AFTER = 64
# Steps with windows, at least, before a plain one is made to show whether the machine has changed or what they cost.
DOUBTED_AFTER = 4
# Schedulers have hiccups, so a new timing counts for at most OUTLIER times what is known. More is known of a batch's
# steps: they count for at most STEP_OUTLIER times, and at least 1 / STEP_OUTLIER times, what is expected. Beside a
# forward a draft is taken to need at most OUTLIER times as long as apart.
OUTLIER = 3.0
STEP_OUTLIER = 1.3
# Microseconds; what is known of a delay or an overhead counts as at least this for OUTLIER, or it stays near zero.
LEAST_TIMING_US = 200.0
# P(decided) of a node's children by rank, before anything was seen, and how many observations that is worth. Measured
# greedily with the included pair, and typical of a drafter that was made for its target: trying it costs little,
# leaving it untried much. A chain's next token is a first child. At most so many children are proposed.
PRIOR_RATES = (0.7, 0.08, 0.04, 0.03, 0.01, 0.01, 0.005, 0.005)
PRIOR_WEIGHT = 4.0
# Observations that what another session learnt of a position counts for.
ELSEWHERE_WEIGHT = 16.0
# P(accept) of a head's tokens is learnt apart for so many classes of how sure it is of them.
SURE_CLASSES = 10
# Tests that the position before is worth in the estimate of the next: later ones are tested less often, differ little.
LATER_WEIGHT = 6.0
# Observations before anything is said of them: a session's verdicts, or turns in a row that were asked for and not
# tested (a drafter on the verifier's cores then only costs).
ENOUGH = 8
# Tokens held against the text before a far drafter is given up.
ENOUGH_COMPARED = 48.0
# Share of a draft during which the verifier computed, up to which it counts as drafted apart.
APART_SHARE = 0.1

# ----------------------------------------------------------------------------------------------------------------------
# What a way of drafting must be expected to gain, as a multiple of what it is to replace.

# Taking turns, over plain decoding: "off when the predicted gain is under 1 %". A batch's windows, over none: of 16
# sessions' estimates those are acted on that err upwards (tests/sim/test_fleet.py). Another window of its turns, over
# the present one: while sessions change theirs some wait for others.
LEAST_GAIN = 1.01
# A stream from hardware of its own, over plain decoding. What is expected of a stream is a little low (sweep).
LEAST_STREAM_GAIN = 1.005
# Taking turns, over plain decoding, before one that is off begins: how long its drafts take is not known well (sweep).
LEAST_ADVANTAGE = 1.05
# A step with the verifier's own guesses, over one without: what they cost is not known to 2 %.
LEAST_GUESS_GAIN = 1.02

# ----------------------------------------------------------------------------------------------------------------------
# What is spent on finding out whether what does not pay would pay by now.

# Share of the time that tries of what does not pay may cost: probes of a drafter that is off, tests of a window,
# drafts of a head.
EXPLORED_SHARE = 0.005
# Verdicts between two probes of a drafter, at least: what the first one costs is not known.
PROBE_EVERY = 128
# Verdicts of a try: where nobody waits, one comparison would teach nothing. So many steps without waiting tell how soon
# an answer comes beside which the drafter computed.
TRIAL_VERDICTS = 16
# Likewise where the verifier waits, or an answer that was drafted while it was idle: one that comes later is too late,
# and the drafter that computes it is in the way meanwhile.
AWAITED_VERDICTS = 4
# Chunks drafted beside forwards that tell how long a token takes, as long as none was drafted while the verifier was
# idle.
MEASURING_CHUNKS = 2
# Tokens that a head drafts for a session's next step, at most: its later ones are hardly ever decided.
MOST_HEAD_DEPTH = 8
# A head reads a text where that takes no longer than is gained on so many further tokens: a third of those that are
# expected to come, because texts end early and nobody is charged for it.
READ_FOR = 128 / 3
# Positions of a prompt that a head reads at a time while it is fed.
READ_AT = 256
# Steps in which a head that does not pay is not thought of again, unless a try is due.
LET_BE = 16
# Positions behind which a head drafts that begins in the middle of a text. The demo pair's is right 0.87 of the time
# behind whole texts, 0.84 behind 64 positions and 0.68 behind 16.
LEAST_BEHIND = 32
# Positions of a text that a head reads before it drafts, at least, where others wait for it; as many more as the
# text's ledger can bear.
LEAST_READ = 64
# Share of what a session's ledger may still lose that one draft of a head and its window may risk.
RISKED_SHARE = 0.33
# Microseconds of forwards for each look for guesses that no plan uses: a look takes 100 to 200 beside forwards, so
# these take up to 1 % of the time. One in each step for each of 16 sessions cost a batch some per cent (LOG); with half
# as many as this, crowds with n-grams lost up to 7 % (sweep).
LOOK_EVERY_US = 2e4
# Tokens that went on as the last guess said, behind which a look is due all the same.
REPEATING = 4

# ----------------------------------------------------------------------------------------------------------------------
# When the verifier waits.

# Share of a plain step, or of a delay that was measured beside a computing verifier, at which an answer is expected.
GUESSED_SHARE = 0.5
# Mean deviations of lateness that are still waited for: TCP's retransmission timer (RFC 6298).
SLACK_DEVIATIONS = 4
# Answers of several sources may be due. The verifier waits for the earliest whose chance of coming in time is at least
# this share of the best chance among them.
LIKELY_SHARE = 0.5
# The ledger: a session may lose this share of its time, and so many plain steps (docs/HOW_IT_WORKS.md).
TOLERATED_SHARE = 0.02
TOLERATED_STEPS = 2.0
# Tokens over which that bound is meant. A head is the verifier's own, and what it gains is known from
# all texts: of a shorter one it may lose as much.
MEANT_OVER = 256

# ----------------------------------------------------------------------------------------------------------------------
# How a drafter is asked to draft.

# Tokens of a chain that is worth drafting whatever is known: the least run-ahead, and so the most of a chunk that
# nobody waits for: a token counts only once its chunk is whole.
SHORT_CHAIN = 4
# Verdicts from one plan to the next, behind the first ENOUGH: planning takes time, too.
PLAN_EVERY = 4
# Drafting a chunk that nobody waits for takes no more than this share of a forward.
CHUNK_SHARE = 0.125
# Tokens of a chunk that the verifier waits for, and no more than are drafted during a forward: a chain is wrong most
# often at its beginning, and the drafter goes on in any case (sweep).
MOST_FIRST_CHUNK = 8
# Tokens of prompts in a step: a long prompt delays the others by no more than that.
PREFILL_ROWS = 512

# ----------------------------------------------------------------------------------------------------------------------
# What a text says of its own continuation.

# Tokens of the n-grams that are looked up first; then come shorter ones, down to the least of MATCH_LENGTHS.
MOST_NGRAM = 4
# Earlier occurrences of the longest that are looked at, the latest first.
OCCURRENCES = 8
# Tokens of a new prompt that are taken in at once, about a microsecond each: a step is not held up by more.
READ_AT_ONCE = 2048
# Tokens of requests' references that are taken in before a step: some 0.3 ms, and fewer take nearly as long.
REFERENCES_BESIDE_A_STEP = 1024
# Tokens of a growing text that others are proposed from once there are so many of them: taken in one by one they take
# four times as long, which sixteen sessions feel in every step.
GATHERED_TOKENS = 128
# Matches from these lengths on behave alike and share their statistics; tokens beyond the last are not compared.
# P(accept) of each before anything was seen.
MATCH_LENGTHS = (2, 3, 4, 8, 16)
TEXT_PRIORS = (0.3, 0.4, 0.6, 0.8, 0.9)
# Lengths of the n-grams that are looked up in texts of other sessions; the longest first.
SHARED_ORDERS = (16, 8, 4, 2)
# Their latest occurrences that are counted to find the likeliest continuation, and links of a chain that are followed
# for that: a proposal may take 50 us, and 8 votes were right no more often (LOG).
VOTES, CHAIN_LINKS = 5, 16
