"""Where sessions were decided last: their keys and values may still be there for the conversation's next turn."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 4096


class Homes:
    """The addresses of the latest sessions' verifiers. Forgetting one costs a prefill, nothing else.

    `fresh`: what was noted since it was emptied last, for whoever tells other orchestrators.
    """

    def __init__(self) -> None:
        self.fresh: dict[str, str] = {}
        self._of: OrderedDict[str, str] = OrderedDict()
        self._learnt: set[str] = set()

    def note(self, session_id: str, address: str) -> None:
        """The session is to be decided there from now on."""
        self._put(session_id, address)
        self._learnt.discard(session_id)
        if len(self.fresh) < REMEMBERED:
            self.fresh[session_id] = address

    def learn(self, session_id: str, address: str) -> None:
        """Another orchestrator has had the session decided there."""
        self._put(session_id, address)
        self._learnt.add(session_id)

    def _put(self, session_id: str, address: str) -> None:
        self._of[session_id] = address
        self._of.move_to_end(session_id)
        if len(self._of) > REMEMBERED:
            forgotten, _ = self._of.popitem(last=False)
            self._learnt.discard(forgotten)

    def of(self, session_id: str) -> str:
        """The address of the session's verifier; "" if that is unknown."""
        return self._of.get(session_id, "")

    def held(self, session_id: str) -> str:
        """The same, of a session that has not been placed here yet: it may be there still, and needs no place."""
        return self.of(session_id) if session_id in self._learnt else ""
