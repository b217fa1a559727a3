"""Known mistakes of the state machines, put into the real code one at a time.

The schedules of `test_machine.py` catch each of `MISTAKES`, the enumeration of `test_branching.py` each of
`TREE_MISTAKES` and `DRAFT_MISTAKES`, that of `test_heads.py` each of `HEAD_MISTAKES`; the simulation imports some of
all and must catch those too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specwire.core import messages
from specwire.core.draft import DraftNode, DraftSession
from specwire.core.messages import DraftToken, FinishReason, Pace, Proposal, SourceKind, Verdict, Weights
from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.policy.windows import Guess
from specwire.core.session import Advised, Session
from specwire.core.text import Ending, Text, Tree
from specwire.core.verify.chains import Chains, Offer
from specwire.core.verify.session import Tail, VerifySession
from specwire.core.verify.text_sources import HeadSource
from tests.patches import Patch, always_returning, with_result

Drawn = Sequence[Weights | None] | None


def emit_before_append(patch: Patch) -> None:
    original = Session._append

    def hasty(self: Session) -> list[messages.Effect]:
        effects = original(self)
        if not effects or self.in_flight is None or self.in_flight.emit is None:
            return effects
        emit, self.in_flight = self.in_flight.emit, replace(self.in_flight, emit=None)
        return [emit, *effects]

    patch.setattr(Session, "_append", hasty)


def two_appends_in_flight(patch: Patch) -> None:
    original = Session._append

    def impatient(self: Session) -> list[messages.Effect]:
        self.in_flight = None
        return original(self)

    patch.setattr(Session, "_append", impatient)


def chain_outlives_its_contradiction(patch: Patch) -> None:
    always_returning(patch, Chains, "advance", [])


def drafter_s_rollback_off_by_one(patch: Patch) -> None:
    original = DraftSession.advance

    def sloppy(self: DraftSession, position: int, tokens: Sequence[int], pace: Pace) -> int:
        return original(self, position, tokens, pace) + 1

    patch.setattr(DraftSession, "advance", sloppy)


def stale_verdict_accepted(patch: Patch) -> None:
    original = Session._on_verdict

    def trusting(self: Session, event: messages.VerdictArrived) -> list[messages.Effect]:
        return original(self, replace(event, attach=self.attach))

    patch.setattr(Session, "_on_verdict", trusting)


def credit_ignored(patch: Patch) -> None:
    def room(self: VerifySession) -> int:
        return 0 if self.finish is not None else self.ending.end - self.position

    patch.setattr(VerifySession, "room", property(room))


def window_one_too_wide(patch: Patch) -> None:
    def window(self: VerifySession, most: int, kind: SourceKind) -> tuple[int, ...]:
        return self.chains.window(self.position, min(most, self.room))

    patch.setattr(VerifySession, "window", window)


def flow_control_ignored(patch: Patch) -> None:
    patch.setattr(Session, "_earned", property(lambda self: self.durable + self.buffer))


def undurable_tokens_half_forgotten(patch: Patch) -> None:
    original = Session._on_verifier_lost

    def forgetful(self: Session, event: messages.VerifierLost) -> list[messages.Effect]:
        self._pending.clear()
        return original(self, event)

    patch.setattr(Session, "_on_verifier_lost", forgetful)


def tail_delivered_from_its_start(patch: Patch) -> None:
    original = Tail.behind

    def twice(self: Tail, position: int, end: int) -> Sequence[Verdict] | None:
        return original(self, self._verdicts[0].position if self._verdicts else position, end)

    patch.setattr(Tail, "behind", twice)


def tail_kept_to_itself(patch: Patch) -> None:
    with_result(patch, Tail, "behind", lambda verdicts: None if verdicts is None else ())


def end_not_told_again(patch: Patch) -> None:
    original = Tail.behind

    def endless(self: Tail, position: int, end: int) -> Sequence[Verdict] | None:
        verdicts = original(self, position, end)
        return verdicts and [verdict._replace(finish=None) for verdict in verdicts]

    patch.setattr(Tail, "behind", endless)


def a_lost_link_lifts_the_limit(patch: Patch) -> None:
    def unbridled(self: VerifySession) -> None:
        self.allowance = replace(self.allowance, credit=self.ending.end)

    patch.setattr(VerifySession, "detach", unbridled)


def reopened_before_the_append_is_acknowledged(patch: Patch) -> None:
    original = Session._open_verifier

    def hasty(self: Session) -> list[messages.Effect]:
        in_flight, self.in_flight = self.in_flight, None
        effects = original(self)
        self.in_flight = in_flight
        return effects

    patch.setattr(Session, "_open_verifier", hasty)


def end_seen_at_a_run_s_last_token_only(patch: Patch) -> None:
    original = Ending.cut

    def hurried(self: Ending, position: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        kept, reason = original(self, position + len(tokens) - 1, tokens[-1:])
        return kept + len(tokens) - 1, reason

    patch.setattr(Ending, "cut", hurried)


def only_the_first_drafter_is_told(patch: Patch) -> None:
    original = Session._advance

    def partial(self: Session, position: int, tokens: tuple[int, ...]) -> list[messages.Effect]:
        return original(self, position, tokens)[:1]

    patch.setattr(Session, "_advance", partial)


def a_paused_drafter_is_not_told_what_it_missed(patch: Patch) -> None:
    original = Advised.advance

    def forgetful(self: Advised, text: Text, position: int, tokens: tuple[int, ...]) -> list[messages.Effect]:
        if self.pace.run_ahead:
            self.missed = None
        return original(self, text, position, tokens)

    patch.setattr(Advised, "advance", forgetful)


# Of trees


def sibling_taken_for_child(patch: Patch) -> None:
    """A piece is read as a chain: each node behind the one before it."""
    original = Tree.extend

    def chained(self: Tree, tokens: Sequence[int], parents: Sequence[int], weights: Drawn = None) -> bool:
        return original(self, tokens, range(self.size - 1, self.size + len(tokens) - 1), weights)

    patch.setattr(Tree, "extend", chained)


def pruned_by_depth_only(patch: Patch) -> None:
    """What stands at a decided position goes; what hung from it stays, below whatever was decided."""
    original = Tree.step

    def shallow(self: Tree, token: int) -> bool:
        layer = {of: self.nodes[number] for of, number in self._root.children.items()}
        for node in layer.values():
            if node.token != token and token in layer:
                for heir, child in node.children.items():
                    layer[token].children.setdefault(heir, child)
                node.children = {}
        self._path = None
        return original(self, token)

    patch.setattr(Tree, "step", shallow)


def subtrees_of_siblings_kept(patch: Patch) -> None:
    """The siblings of a decided token are forgotten, and what is behind them is not."""

    def shallow(self: Tree, numbers: list[int]) -> None:
        for number in numbers:
            del self.nodes[number]

    patch.setattr(Tree, "_prune", shallow)


def contradicted_tree_outlives_it(patch: Patch) -> None:
    """Where no child equals the decided token, all children stay."""
    original = Tree.follow

    def lenient(self: Tree, text: Text) -> bool:
        while self.position < len(text) and text.tokens[self.position] in self._root.children:
            original(self, Text(text.tokens[: self.position + 1]))
        return False

    patch.setattr(Tree, "follow", lenient)


def stale_trees_kept_when_taken_over(patch: Patch) -> None:
    patch.setattr(Chains, "forget", lambda self: self._newest.clear())


def node_numbers_given_twice(patch: Patch) -> None:
    """A piece that comes again is taken for new nodes of the same numbers."""
    original = Chains._extend

    def repeated(self: Chains, tree: Tree, proposal: Proposal, text: Text, success: Offer = Offer.EXTENDED) -> Offer:
        tree.size = min(tree.size, proposal.offset)
        return original(self, tree, proposal, text, success)

    patch.setattr(Chains, "_extend", repeated)


def lost_pieces_passed_over(patch: Patch) -> None:
    """Nodes are numbered as they arrive: those behind a lost piece take its numbers."""
    original = Chains._extend

    def bridged(self: Chains, tree: Tree, proposal: Proposal, text: Text, success: Offer = Offer.EXTENDED) -> Offer:
        return original(self, tree, replace(proposal, offset=min(proposal.offset, tree.size)), text, success)

    patch.setattr(Chains, "_extend", bridged)


def equal_siblings_both_taken(patch: Patch) -> None:
    """The second one replaces the first, whose subtree stays."""
    original = Tree.extend

    def replacing(self: Tree, tokens: Sequence[int], parents: Sequence[int], weights: Drawn = None) -> bool:
        added = False
        for token, parent in zip(tokens, parents, strict=True):
            above = self.node(parent)
            if above is not None:
                above.children.pop(token, None)
            added = original(self, (token,), (parent,)) or added
        return added

    patch.setattr(Tree, "extend", replacing)


def unknown_parent_taken_for_the_text(patch: Patch) -> None:
    """What was pruned, and what was never sent, hangs from the decided text."""
    original = Tree.extend

    def adopting(self: Tree, tokens: Sequence[int], parents: Sequence[int], weights: Drawn = None) -> bool:
        added = False
        for token, parent in zip(tokens, parents, strict=True):
            known = parent if self.node(parent) is not None else self.root
            added = original(self, (token,), (known,)) or added
        return added

    patch.setattr(Tree, "extend", adopting)


def parent_that_was_never_sent_accepted(patch: Patch) -> None:
    def trusting(self: Chains, proposal: Proposal) -> bool:
        return all(0 <= token < self.vocabulary for token in proposal.tokens)

    patch.setattr(Chains, "_in_range", trusting)


def path_remembered_across_a_verdict(patch: Patch) -> None:
    """A window is taken from the tree as it was."""
    original = Tree.step

    def lazy(self: Tree, token: int) -> bool:
        path = list(self._path or ())
        followed = original(self, token)
        self._path = path
        return followed

    patch.setattr(Tree, "step", lazy)


def first_child_met_whatever_was_chosen(patch: Patch) -> None:
    """The last row is held against the likeliest child, although the chosen one is there."""
    original = Chains.behind

    def hasty(
        self: Chains, position: int, window: Sequence[int], chosen: int | None = None
    ) -> tuple[int, DraftToken | None]:
        return original(self, position, window)

    patch.setattr(Chains, "behind", hasty)


TREE_MISTAKES = [
    sibling_taken_for_child,
    pruned_by_depth_only,
    subtrees_of_siblings_kept,
    contradicted_tree_outlives_it,
    stale_trees_kept_when_taken_over,
    node_numbers_given_twice,
    lost_pieces_passed_over,
    equal_siblings_both_taken,
    unknown_parent_taken_for_the_text,
    parent_that_was_never_sent_accepted,
    path_remembered_across_a_verdict,
    first_child_met_whatever_was_chosen,
]


# Of a head's proposals


def head_s_tokens_taken_untested(patch: Patch) -> None:
    original = VerifySession.resolve

    def trusting(
        self: VerifySession, chosen: Sequence[int], window: Sequence[int], kind: SourceKind, *more: Any, **named: Any
    ) -> Verdict:
        if kind is SourceKind.HEAD:
            chosen = [*window, *chosen[len(window) :]]
        return original(self, chosen, window, kind, *more, **named)

    patch.setattr(VerifySession, "resolve", trusting)


def head_s_proposal_outlives_its_text(patch: Patch) -> None:
    original = HeadSource.look

    def look(self: HeadSource) -> Guess | None:
        guess = self._guess
        return original(self) or (guess and guess._replace(position=len(self._tokens)))

    patch.setattr(HeadSource, "look", look)
    patch.setattr(HeadSource, "text_grew", lambda self: None)


def undecided_tokens_of_a_head_counted(patch: Patch) -> None:
    original = HeadSource.text_grew

    def hasty(self: HeadSource) -> None:
        if self._guess is not None:
            self._learnt.observe(len(self._guess.tokens), 0)
            self._guess = None
        original(self)

    patch.setattr(HeadSource, "text_grew", hasty)


def head_for_every_rule(patch: Patch) -> None:
    original = VerifySession.opened

    def opened(*args: Any, **named: Any) -> VerifySession:
        session = original(*args, **named)
        session.head = HeadSource(session.text.tokens, AcceptanceByPosition()) if "head" in named else None
        return session

    patch.setattr(VerifySession, "opened", opened)


HEAD_MISTAKES = [
    head_s_tokens_taken_untested,
    head_s_proposal_outlives_its_text,
    undecided_tokens_of_a_head_counted,
    head_for_every_rule,
]


# Of a drafter's tree


def candidate_taken_for_a_node(patch: Patch) -> None:
    """A decided runner-up that was never sent is taken for the node that was sent last."""
    original = DraftSession._number_anew

    def confused(self: DraftSession) -> None:
        if self.root.token >= 0 and self._size:
            self.root.number = self._size - 1
        else:
            original(self)

    patch.setattr(DraftSession, "_number_anew", confused)


def nodes_numbered_as_they_are_drafted(patch: Patch) -> None:
    """Those that are pruned before they are sent leave gaps."""
    original = DraftSession._child

    def early(self: DraftSession, parent: DraftNode, rank: int) -> DraftNode:
        child = original(self, parent, rank)
        if child.number is None:
            child.number, self._size = self._size, self._size + 1
        return child

    patch.setattr(DraftSession, "_child", early)
    patch.setattr(DraftSession, "_numbered", lambda self, node: node.parent.number)


def pruned_nodes_sent(patch: Patch) -> None:
    original = DraftSession.advance

    def untidy(self: DraftSession, position: int, tokens: Sequence[int], pace: Pace, epoch: int = 0) -> int:
        unsent, kept = self.unsent, original(self, position, tokens, pace, epoch)
        self.unsent = unsent
        return kept

    patch.setattr(DraftSession, "advance", untidy)


def pruned_nodes_counted(patch: Patch) -> None:
    def sparing(self: DraftSession, nodes: list[DraftNode]) -> None:
        while nodes:
            node = nodes.pop()
            node.live = False
            nodes.extend(node.children.values())

    patch.setattr(DraftSession, "_prune", sparing)


def run_ahead_of_the_line_only(patch: Patch) -> None:
    """Branches are not counted."""
    original: property = DraftSession.wants_token  # type: ignore[assignment] # of the class

    def eager(self: DraftSession) -> bool:
        pace = self.pace
        self.pace = replace(pace, run_ahead=pace.run_ahead + self.in_flight - (len(self.line) - self.decided))
        wants = original.fget(self) if original.fget else False
        self.pace = pace
        return bool(wants)

    patch.setattr(DraftSession, "wants_token", property(eager))


def drafter_s_tree_outlives_a_rollback(patch: Patch) -> None:
    """The text goes another way, and what was drafted behind the old one stays."""
    original = DraftSession._begin

    def stale(self: DraftSession) -> None:
        if self.root.children:
            self._number_anew()
        else:
            original(self)

    patch.setattr(DraftSession, "_begin", stale)


def child_sent_before_its_parent(patch: Patch) -> None:
    with_result(patch, DraftSession, "_due_nodes", lambda nodes: nodes[::-1])


def runner_up_behind_the_one_before_it(patch: Patch) -> None:
    """Siblings are sent as a chain."""
    original = DraftSession._numbered

    def chained(self: DraftSession, node: DraftNode) -> int:
        original(self, node)
        return self._size - 2

    patch.setattr(DraftSession, "_numbered", chained)


DRAFT_MISTAKES = [
    candidate_taken_for_a_node,
    nodes_numbered_as_they_are_drafted,
    pruned_nodes_sent,
    pruned_nodes_counted,
    run_ahead_of_the_line_only,
    drafter_s_tree_outlives_a_rollback,
    child_sent_before_its_parent,
    runner_up_behind_the_one_before_it,
]

MISTAKES = [
    only_the_first_drafter_is_told,
    a_paused_drafter_is_not_told_what_it_missed,
    emit_before_append,
    two_appends_in_flight,
    chain_outlives_its_contradiction,
    drafter_s_rollback_off_by_one,
    stale_verdict_accepted,
    credit_ignored,
    window_one_too_wide,
    flow_control_ignored,
    undurable_tokens_half_forgotten,
    tail_delivered_from_its_start,
    tail_kept_to_itself,
    end_not_told_again,
    a_lost_link_lifts_the_limit,
    reopened_before_the_append_is_acknowledged,
    end_seen_at_a_run_s_last_token_only,
    sibling_taken_for_child,
    pruned_by_depth_only,
    subtrees_of_siblings_kept,
    contradicted_tree_outlives_it,
    node_numbers_given_twice,
    unknown_parent_taken_for_the_text,
    path_remembered_across_a_verdict,
    candidate_taken_for_a_node,
    pruned_nodes_sent,
    run_ahead_of_the_line_only,
    drafter_s_tree_outlives_a_rollback,
    runner_up_behind_the_one_before_it,
]
