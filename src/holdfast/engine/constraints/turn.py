"""The constraint of one turn: its matcher, fed with the turn's tokens, and tokens that are forced.

Forced tokens come from the grammar, where it leaves no choice, or from outside (`force`: a thinking budget
that is spent). Wherever a token is forced, the turn takes that token and no other that the mask would allow,
so that its tokens are the same whether they are taken at once (`take_forced`) or sampled one at a time under
a mask of one bit. The turn's stream owns the constraint; the executor asks it for masks.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.constraints.matcher import Matcher

__all__ = ["TurnConstraint"]


class TurnConstraint:
    """What may follow the tokens of one turn. `matcher` is None where only `force` constrains."""

    __slots__ = ("_ahead", "_run", "matcher", "position", "takes_runs")

    def __init__(self, matcher: Matcher | None, *, takes_runs: bool = True) -> None:
        """Without `takes_runs` forced tokens are sampled one at a time: each needs its own logits."""
        self.matcher = matcher
        self.takes_runs = takes_runs
        self._run: list[int] | None = None
        """The forced tokens that come next; None while they are not known."""
        self._ahead: int | None = None
        """The token that the matcher has taken before it was accepted here."""
        self.position = 0
        """Tokens that the matcher has taken: a mask that was filled at another position is stale."""

    @property
    def failed(self) -> bool:
        """Whether a token was refused, or a limit exceeded: nothing may follow."""
        return self.matcher is not None and self.matcher.failed

    @property
    def why(self) -> str:
        """Why it has failed."""
        return "" if self.matcher is None else self.matcher.why

    @property
    def free(self) -> bool:
        """Whether any token may follow: no mask is needed."""
        return self.matcher is None and not self._run

    def force(self, tokens: Sequence[int]) -> None:
        """These tokens come next, instead of those that the grammar forces."""
        self._run = list(tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        """Take tokens of the turn, in order."""
        if self._ahead is not None:
            assert [self._ahead] == list(tokens), "another token was taken ahead"
            self._ahead = None
            return
        run, count = self._run, len(tokens)
        # A run that is taken token by token is the same as one taken at once.
        follows = run is not None and count < len(run) and run[:count] == list(tokens)
        self._run = run[count:] if run is not None and follows else None
        self.position += count
        if self.matcher is not None:
            self.matcher.accept(tokens)

    @property
    def grammar_matcher(self) -> Matcher:
        """The matcher, where there is a grammar."""
        assert self.matcher is not None, "without a grammar only forced tokens constrain"
        return self.matcher

    @property
    def waits(self) -> bool:
        """Whether the matcher may take the next token before `accept`: no run of tokens is pending."""
        return self.matcher is not None and not self._run and self._ahead is None

    @property
    def fillable(self) -> bool:
        """Whether the next mask is the matcher's: no run of tokens is pending, nothing has failed."""
        return self.matcher is not None and not self._run and not self.matcher.failed

    def took_ahead(self, token: int) -> None:
        """The matcher has taken the turn's next token; `accept` follows. From now on `forced` is after it."""
        self._ahead, self._run = token, None
        self.position += 1

    @property
    def chooses(self) -> bool:
        """Whether the next token is known to be one of several: nothing is forced, nothing has failed."""
        return self._run is not None and not self._run

    def forced(self) -> Sequence[int]:
        """The tokens that come next; empty if there is a choice, or if nothing may follow."""
        if self.failed:
            return ()
        if self._run is None:
            self._run = [] if self.matcher is None else self.matcher.forced()
        return self._run

    def cut(self, drafts: Sequence[int]) -> list[int]:
        """The drafts up to the first that cannot come, or after which a token is forced."""
        if self.failed or self.forced():
            return []
        if self.matcher is None:
            return list(drafts)
        kept: list[int] = []
        for draft in drafts[: self.matcher.validate(drafts)]:
            self.matcher.accept([draft])
            kept.append(draft)
            if self.matcher.forced():
                break
        if not self.matcher.failed:
            self.matcher.rollback(len(kept))
        return kept
