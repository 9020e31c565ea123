"""Which of an output's tokens are reasoning, and which are text, by what delimits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from any_agent.chat.output.markers import CALLS_OPEN, THINK_CLOSE, TOOL_OPEN, Piece


class TokenSpans:
    """Of one model's outputs; where no one token delimits a region, it is not told."""

    def __init__(self, by_id: Mapping[int, Piece]) -> None:
        """``by_id``: the tokens that are markers, with their kinds."""
        self._closes = {i for i, (_, kind) in by_id.items() if kind == THINK_CLOSE}
        self._opens = {i for i, (_, kind) in by_id.items() if kind in (TOOL_OPEN, CALLS_OPEN)}

    def reasoning(self, ids: Sequence[int], *, reasoned: bool, said: bool) -> int:
        """How many tokens the reasoning takes, with the token that ends it; 0 if it is not known.

        ``reasoned``: whether the message has reasoning; ``said``: whether it has anything else.
        """
        if not reasoned:
            return 0
        end = _first(ids, self._closes, 0)
        if end is None and said:
            # A call may have ended it.
            end = _first(ids, self._opens, 0)
            return 0 if end is None else end
        return len(ids) if end is None else end + 1

    def text(self, ids: Sequence[int], start: int, *, calls: bool) -> tuple[int, int]:
        """The tokens from the reasoning's end, ``start``, to what opens the first call."""
        end = _first(ids, self._opens, start) if calls else None
        return start, len(ids) if end is None else end


def _first(ids: Sequence[int], wanted: set[int], start: int) -> int | None:
    """The first place of any of them."""
    places = []
    for each in wanted:
        try:
            places.append(ids.index(each, start))
        except ValueError:
            continue
    return min(places, default=None)
