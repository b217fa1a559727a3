"""The models that an orchestrator serves: a target for each fingerprint of weights that a verifier has shown."""

from __future__ import annotations

from collections.abc import Collection

import grpc

from orchestrator.link import Info
from orchestrator.target import Target
from orchestrator.tokenizers import Tokenizers
from specwire.core.sampling import InvalidParameter
from specwire.rpc.errors import StatusError
from specwire.text import TokenizerError

# For which a model is still known that no verifier has any more: they may come back, and until then it is not unknown.
KEPT_S = 600.0


class Models:
    """Several models side by side have different names. One name may have several *versions*, with other weights.

    A session is pinned to a version. Which one new sessions get is the pool's to say.

    Args:
        tokenizers: those of verifiers' descriptions.
    """

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
        self._by_weights: dict[str, Target] = {}
        self._missed: dict[str, float] = {}

    def learn(self, info: Info, versions: bool) -> str | None:
        """Know a verifier's model from now on; why the verifier must not be used, or None.

        versions: a model that is known by this name may have other weights there.
        """
        if info.weights_fingerprint in self._by_weights:
            return None
        known = self.named(info.model)
        if known and not versions:
            served, offered = known[0].info.weights_fingerprint, info.weights_fingerprint
            return f"serves weights {offered[:12]}, but sessions here are pinned to {served[:12]}"
        try:
            self._by_weights[info.weights_fingerprint] = Target.of(info, self._tokenizers.of(info))
        except TokenizerError as error:
            return str(error)
        return None

    def all(self) -> list[Target]:
        return list(self._by_weights.values())

    def names(self) -> list[str]:
        return sorted({target.info.model for target in self._by_weights.values()})

    def named(self, name: str) -> list[Target]:
        """All versions, in the order in which they were first seen."""
        return [target for target in self._by_weights.values() if target.info.model == name]

    def pinned(self, weights: str) -> Target | None:
        return self._by_weights.get(weights)

    def meant(self, name: str) -> str:
        """The name of the model that a request means by `name`; by "" the only one.

        Raises:
            StatusError: UNAVAILABLE, none is known yet; NOT_FOUND, this one is not.
            InvalidParameter: there are several, and none is named.
        """
        names = self.names()
        if not names:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "no verifier has answered yet")
        if name in names:
            return name
        listed = ", ".join(map(repr, names))
        if name:
            are = "is" if len(names) == 1 else "are"
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"model: {name!r} is not served here; {listed} {are}")
        if len(names) > 1:
            raise InvalidParameter("model", f"must be named: {listed} are served here")
        return names[0]

    def sweep(self, present: Collection[str], now: float) -> None:
        """Forget what no verifier has had for a while. present: fingerprints of those that there are."""
        for weights in list(self._by_weights):
            if weights in present:
                self._missed.pop(weights, None)
            elif now - self._missed.setdefault(weights, now) > KEPT_S:
                del self._by_weights[weights], self._missed[weights]
