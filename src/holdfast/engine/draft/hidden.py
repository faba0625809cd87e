"""Hidden states of the target model on their way to a draft head.

Each step of the executor leaves what it computed here, as a `Piece` of each row: references, not copies, but
where a graph will overwrite the tensors. A piece lives until its places are fed. What is left of it then (the
last token of a history, whose successor nobody knows yet; a few tokens of a session that does not draft) is
copied, so that it does not keep a whole step alive, and belongs to the session's entry in the cache: it is
dropped with it. Used by `head_proposer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.layout import MemoryLayout
from holdfast.core.plan import Row
from holdfast.core.tokens import TokenLog
from holdfast.core.turn import Turn
from holdfast.engine.draft.cache import DraftCache

__all__ = ["HeadCache", "HiddenStates", "Piece", "Span"]


class Piece:
    """The hidden states of one row: of the tokens from position `start` on, in rows `first` on of `features`.

    The last of the tokens may be drafts. `number` is that of the row's session.
    """

    __slots__ = ("features", "first", "number", "own", "start", "tokens", "turn")

    def __init__(self, row: Row[Turn], features: tuple[Tensor, ...], first: int) -> None:
        self.turn = row.turn
        self.number = row.number
        self.start = row.start
        self.tokens = row.tokens
        self.features = features
        self.first = first
        self.own = False
        """Whether the tensors are copies of what was left of pieces."""

    def agreed(self, log: TokenLog) -> int:
        """The end of the positions whose tokens are those of a log."""
        said = log.slice(self.start, self.start + len(self.tokens))
        if said == self.tokens:
            return self.start + len(said)
        pairs = zip(said, self.tokens, strict=False)
        different = next((place for place, (one, other) in enumerate(pairs) if one != other), len(said))
        return self.start + different


class Span(NamedTuple):
    """Consecutive tokens of a piece: rows `first` to `stop` of its tensors."""

    features: tuple[Tensor, ...]
    first: int
    stop: int


class HiddenStates:
    """What the latest steps have computed, by session; a `Watch` of the executor."""

    __slots__ = ("copies", "fresh", "off")

    def __init__(self) -> None:
        self.fresh: dict[str, list[Piece]] = {}
        self.off = False
        """Whether nobody wants them any more."""
        self.copies = 0
        """Tensors that were copied, because a graph overwrites them or of a piece something was left."""

    def note(self, rows: Sequence[Row[Turn]], features: tuple[Tensor, ...], *, reused: bool) -> None:
        """A step was launched."""
        if self.off:
            return
        if reused:
            count = sum(row.count for row in rows)
            features = tuple(each[:count].clone() for each in features)
            self.copies += len(features)
        first = 0
        for row in rows:
            self.fresh.setdefault(row.turn.session_id, []).append(Piece(row, features, first))
            first += row.count

    def stop(self) -> None:
        """Nobody wants them any more."""
        self.off = True
        self.fresh.clear()

    def take(self, session_id: str, number: int) -> list[Piece]:
        """The new pieces of a session; those of an older one of this name are dropped."""
        return [piece for piece in self.fresh.pop(session_id, ()) if piece.number == number]

    @torch.inference_mode()
    def keep(self, pieces: Iterable[Piece]) -> None:
        """Copy what is left of pieces, in one launch for each tensor that they share."""
        by_tensor: dict[int, list[Piece]] = {}
        for piece in pieces:
            if not piece.own:
                by_tensor.setdefault(id(piece.features[0]), []).append(piece)
        for together in by_tensor.values():
            rows = [place for each in together for place in range(each.first, each.first + len(each.tokens))]
            features = together[0].features
            index = torch.tensor(rows).to(features[0].device, non_blocking=True)
            copies = tuple(each.index_select(0, index) for each in features)
            self.copies += len(copies)
            first = 0
            for each in together:
                each.features, each.first, each.own = copies, first, True
                first += len(each.tokens)


class HeadCache(DraftCache):
    """The memory of a head: beside pages, each session has what is left of the pieces that it was fed."""

    __slots__ = ("pieces",)

    def __init__(self, layout: MemoryLayout, pages: int) -> None:
        super().__init__(layout, pages, lag=1)
        self.pieces: dict[str, list[Piece]] = {}

    def release(self, session_id: str) -> None:
        """Give up the memory of a session, if it has any."""
        self.pieces.pop(session_id, None)
        super().release(session_id)
