"""The token ids of the paths that are likely to be continued next, put together."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from any_agent.types import IdArray

_MOST = 4
"""Paths: agents of one session may take turns."""


class TokenPathCache:
    """Prompt + output of a few interactions, by id; may be used from any thread."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, IdArray] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0

    def get(self, interaction_id: str) -> IdArray | None:
        return self._ids.get(interaction_id)

    def put(self, interaction_id: str, ids: IdArray, *, instead_of: str | None) -> None:
        """Keep a path, which begins with another one that need not be kept any more."""
        ids.setflags(write=False)
        with self._lock:
            if instead_of is not None:
                self._drop(instead_of)
            self._drop(interaction_id)
            self._ids[interaction_id] = ids
            self.nbytes += ids.nbytes
            while len(self._ids) > _MOST:
                self._drop(next(iter(self._ids)))

    def _drop(self, interaction_id: str) -> None:
        ids = self._ids.pop(interaction_id, None)
        if ids is not None:
            self.nbytes -= ids.nbytes
