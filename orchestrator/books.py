"""What is written down when a session begins here, comes from another orchestrator, goes to one, or ends.

Figures are counted, its tenant is charged, and the process's log is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from orchestrator.driver import SessionDriver
from orchestrator.store import SessionRecord
from orchestrator.tally import OrchestratorTally
from orchestrator.tenants import Allowances
from orchestrator.totals import Totals
from specwire.core.effects import End
from specwire.rpc.errors import StatusError
from specwire.telemetry.logs import SHOWN_CHARACTERS, of_session

logger = logging.getLogger(__name__)


class Books:
    """One for all sessions of an orchestrator. `tally`, `totals`: for metrics.

    Args:
        text_of: a record's prompt, as text, where log lines are to have prompts and outputs; else None.
    """

    def __init__(self, allowances: Allowances, text_of: Callable[[SessionRecord], str] | None) -> None:
        self.tally = OrchestratorTally()
        self.totals = Totals()
        self._allowances = allowances
        self._text_of = text_of

    def refused(self, error: StatusError) -> None:
        """A session was not begun."""
        self.tally.refused[error.code.name.lower()] += 1

    def begun(self, record: SessionRecord) -> None:
        """A session began here; its tenant was charged when it was admitted."""
        self.tally.begun += 1
        self.tally.prompt_tokens += len(record.prompt)
        if not logger.isEnabledFor(logging.INFO):
            return
        shown = record.session_id[:SHOWN_CHARACTERS]
        texts = {} if self._text_of is None else {"prompt": self._text_of(record)}
        logger.info("session %s: begun with %d tokens", shown, len(record.prompt), extra=of_session(shown, **texts))

    def taken_up(self, record: SessionRecord) -> None:
        """A session that another orchestrator drove is driven here from now on."""
        self.tally.claims += 1
        self._allowances.adopt(record)

    def lost(self, record: SessionRecord) -> None:
        """Another orchestrator has claimed the session, or the log has gone another way."""
        self.tally.fenced += 1
        self._allowances.leave(record)

    def forgotten(self, driver: SessionDriver) -> None:
        """A session is not known here any more, ended or not."""
        self._settle(driver)
        self.totals.keep(driver.stats)
        driver.span.end()

    def ended(self, driver: SessionDriver) -> None:
        """It ended here, for readers at least."""
        self._settle(driver)
        if driver.output.end is not None:
            self.totals.count(driver.stats, driver.output.end.reason)
            self.tally.ended(driver.stats)
            self._log_ended(driver, driver.output.end)

    def _settle(self, driver: SessionDriver) -> None:
        self._allowances.settle(driver.record, len(driver.record.prompt) + len(driver.output.tokens))

    def _log_ended(self, driver: SessionDriver, end: End) -> None:
        stats, shown = driver.stats, driver.record.session_id[:SHOWN_CHARACTERS]
        texts = {} if self._text_of is None else {"output": driver.output.text}
        message = "session %s: ended (%s) with %d tokens in %d forwards, %d of %d draft tokens accepted, after %.3f s"
        took = (stats.ended or stats.started) - stats.started
        figures = (len(driver.output.tokens), stats.target_forwards, stats.shown.accepted, stats.shown.tested, took)
        logger.info(message, shown, end.reason.name.lower(), *figures, extra=of_session(shown, **texts))
