"""Which model a call means: a frozen one by its name, else the policy, whatever it calls that."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from any_agent.config import ModelConfig
from any_agent.errors import NotFound

OTHER = "other"
_MAX_NAMES = 32
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")


class PolicyNames:
    """The names that agents give the policy: counted, and refused where only some are taken."""

    def __init__(self, config: ModelConfig) -> None:
        self._known = (config.name, *config.policy_names)
        self._rejects = config.unknown_model == "reject"
        self.calls: Counter[str] = Counter()
        """Calls of the policy by what they called it. Only so many names are told apart: they are
        clients' own words."""

    def take(self, body: Any) -> None:
        """Count a call of the policy; NotFound (`model_not_found`) if it names something else."""
        name = body.get("model") if isinstance(body, dict) else None
        if name is None:
            name = self._known[0]
        if not isinstance(name, str):
            # The parser says what is wrong with it.
            return
        if self._rejects and name not in self._known:
            raise NotFound(
                f"there is no model {name[:80]!a}; the policy is called {self._known[0]!a}",
                code="model_not_found",
                param="model",
            )
        known = name in self.calls or name in self._known
        if known or (len(self.calls) < _MAX_NAMES and _PLAIN.fullmatch(name)):
            self.calls[name] += 1
        else:
            self.calls[OTHER] += 1
