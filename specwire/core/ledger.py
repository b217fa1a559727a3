"""The ledger that makes "never slower" a rule instead of a hope (ARCHITECTURE.md section 1).

    L = time spent - time that plain decoding would have taken for the same tokens

L stays within 2 % of the elapsed time plus two plain steps: a window and a wait are begun only if L would stay there
even though no draft token is accepted; beyond it the session decodes plainly. A step's waiting and its wider forward
are charged, probes included; in a batch a window to its own session, by what it costs all (`part_of`). Not
charged: windows in a step that also feeds a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

TOLERATED_SHARE = 0.02
TOLERATED_STEPS = 2.0


@dataclass(slots=True)
class Ledger:
    """Microseconds. A reattached session starts from its predecessor's balance."""

    balance_us: float = 0.0
    elapsed_us: float = 0.0

    def charge(self, spent_us: float, tokens: int, plain_step_us: float, cost_us: float | None = None) -> None:
        """A step took `spent_us` (its waiting included) and decided `tokens`. cost_us: what it owes, if not that."""
        self.balance_us += (spent_us if cost_us is None else cost_us) - tokens * plain_step_us
        self.elapsed_us += spent_us

    def spare_us(self, plain_step_us: float) -> float:
        """What the next step may lose at worst; negative in debt."""
        return TOLERATED_SHARE * self.elapsed_us + TOLERATED_STEPS * plain_step_us - self.balance_us


def part_of(window: int, windows: int, sessions: int) -> float:
    """What a session is charged of the time that a batch's windows take, as a multiple of that time.

    Everybody waits for everybody's draft tokens, and each of a batch's `sessions` is charged for its own `window` of
    all `windows` only, but for what it costs them all: who has the mean window is charged the whole time once. So the
    batch never loses more than its sessions are allowed to lose on average, and nobody runs into debt by windows that
    are not its own, which forgoing its own could never repay (docs/LOG.md).
    """
    return sessions * window / windows if windows else 1.0
