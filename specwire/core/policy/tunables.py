"""The numbers that a verifier's policy is tuned by, those of vLLM's plugin apart. They change speed, not a text's law.

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
# Weight of a plain step in how slow the machine is now (simulated cells).
PACE_WEIGHT = 0.5
# Pairs of a plain step and one with windows whose median tells what windows take; a third of them will do. A median
# bears a machine that is slow for every third step.
SEEN_STEPS = 9
# Schedulers have hiccups, so a new timing counts for at most OUTLIER times what is known. Beside a forward a draft is
# taken to need at most OUTLIER times as long as apart.
OUTLIER = 3.0
# Microseconds; what is known of a delay or an overhead counts as at least this for OUTLIER, or it stays near zero.
LEAST_TIMING_US = 200.0
# P(decided) of a node's children by rank, before anything was seen, and how many observations that is worth. Measured
# greedily with the included pair, and typical of a drafter that was made for its target: trying it costs little,
# leaving it untried much. A chain's next token is a first child. At most so many children are proposed.
PRIOR_RATES = (0.7, 0.08, 0.04, 0.03, 0.01, 0.01, 0.005, 0.005)
PRIOR_WEIGHT = 4.0
# Observations that what another session learnt of a position counts for.
ELSEWHERE_WEIGHT = 16.0
# Observations before anything is said of them: a session's verdicts, or turns in a row that were asked for and not
# tested (a drafter on the verifier's cores then only costs).
ENOUGH = 8

# ----------------------------------------------------------------------------------------------------------------------
# What a way of drafting must be expected to gain, and may lose.

# Windows, turns, and a head's drafts, over none, and turns over the present ones, as a multiple. What they cost is not
# known to 2 %, and of 16 sessions' estimates those are acted on that err upwards (tests/sim/test_fleet.py).
LEAST_GAIN = 1.02
# The ledger: a session may lose this share of its time, and so many plain steps. What it cannot see, that a drafter
# goes on for a while and a machine changes, may lose half a percent more. With two steps chance ends a head in a batch
# where it pays (tests/sim/test_simulation.py).
TOLERATED_SHARE = 0.015
TOLERATED_STEPS = 3.0
# Share of the time that tries of what does not pay may cost: of a drafter that is off, a window, a head. A stream from
# hardware of its own delays nobody, and goes on while it gains as much.
EXPLORED_SHARE = 0.005
# Verdicts of a try where nobody waits, one comparison would teach nothing; verdicts between two plans of what is off,
# and steps in which a head that does not pay is not thought of: thinking takes time, too.
TRIAL_VERDICTS = 16

# ----------------------------------------------------------------------------------------------------------------------
# How drafters and heads are asked to draft, and texts are searched.

# Verdicts from one plan to the next, behind the first ENOUGH, and of a try where the verifier waits: a later answer is
# too late. Steps with windows, at least, before a plain one is made to show what has changed.
PLAN_EVERY = 4
# Mean deviations of lateness that are still waited for: TCP's retransmission timer (RFC 6298).
SLACK_DEVIATIONS = 4
# Tokens of a chain that is worth drafting whatever is known: the least run-ahead, and so the most of a chunk that
# nobody waits for, and half of one that is waited for (LOG): a token counts only once its chunk is whole. A text that
# was searched in vain so often, in a row, is searched only in turn, unless so many tokens go on as the last guess said.
SHORT_CHAIN = 4
# Drafting a chunk that nobody waits for takes no more than this share of a forward; as soon an answer may come of which
# nothing is known.
CHUNK_SHARE = 0.125
# Tokens that a head drafts for a session's next step, at most: its later ones are hardly ever decided.
MOST_HEAD_DEPTH = 8
# Positions behind which a head drafts that begins in the middle of a text, and which it reads beside a draft. The demo
# pair's is right 0.87 of the time behind whole texts, 0.84 behind 64 positions and 0.68 behind 16. So many steps
# features are kept while nothing is drafted that pays.
LEAST_BEHIND = 32
# Microseconds of forwards for each look for guesses that no plan uses: a look takes 100 to 200 beside forwards, so
# these take about 1 % of the time. One in each step for each of 16 sessions cost a batch some per cent (LOG); with half
# as many as this, crowds with n-grams lost up to 10 % (simulated cells).
LOOK_EVERY_US = 1.5e4
# Tokens of prompts in a step: a long prompt delays the others by no more than that.
PREFILL_ROWS = 512

# ----------------------------------------------------------------------------------------------------------------------
# What a text says of its own continuation.

# Tokens of a new prompt that are taken in at once, about a microsecond each: a step is not held up by more. Half as
# many of requests' references, which take some 0.3 ms; of a growing text that others are proposed from a sixteenth:
# taken in one by one they take four times as long, which sixteen sessions feel in every step.
READ_AT_ONCE = 2048
# Matches from these lengths on behave alike and share their statistics; tokens beyond the last are not compared.
# P(accept) of each before anything was seen.
MATCH_LENGTHS = (2, 3, 4, 8, 16)
TEXT_PRIORS = (0.3, 0.4, 0.6, 0.8, 0.9)
# Lengths of the n-grams that are looked up in texts of other sessions, the longest first; in a session's own text from
# the last but one on.
SHARED_ORDERS = (16, 8, 4, 2)
# Their latest occurrences that are counted to find the likeliest continuation, of three times as many that are looked
# at: a proposal may take 50 us, and 8 votes were right no more often (LOG).
VOTES = 5
