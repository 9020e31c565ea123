"""The findings of the suite `clients`, as `results.json` keeps them for compatibility.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
WORKS = "works"


@dataclass(slots=True)
class Results:
    """By client, API and feature: that it works, or why it does not; and the shipped agents."""

    clients: dict[str, dict[str, str]] = field(default_factory=dict)
    cells: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Shipped agents by name: what each is, and what its session came to."""

    @classmethod
    def read(cls) -> Results:
        if not RESULTS.exists():
            return cls()
        return cls(**json.loads(RESULTS.read_text(encoding="utf-8")))

    def write(self) -> None:
        text = json.dumps(asdict(self), indent=2, sort_keys=True)
        RESULTS.write_text(text + "\n", encoding="utf-8")

    def note(self, client: Any, api: str, feature: str, outcome: str) -> None:
        """What does not work once does not work: a cell may have several tests."""
        self.clients[client.name] = {
            "title": client.title,
            "package": client.package,
            "version": client.version,
            "registry": client.registry,
        }
        row = self.cells.setdefault(client.name, {}).setdefault(api, {})
        if row.get(feature, WORKS) == WORKS:
            row[feature] = outcome

    def over(self, older: Results) -> Results:
        """These, and what is recorded of clients that were not tried this time."""
        return Results(
            {**older.clients, **self.clients},
            {**older.cells, **self.cells},
            {**older.agents, **self.agents},
        )

    def differing(self, recorded: Results) -> list[str]:
        """What is not as it was recorded, of what was tried."""
        return [
            f"{name}: {api}, {feature}: {outcome}; recorded is {was}"
            for name, apis in self.cells.items()
            for api, row in apis.items()
            for feature, outcome in row.items()
            if (was := _of(recorded.cells, name, api, feature)) != outcome
        ] + [
            f"{name}: {about}; recorded is {before.get(name)}"
            for now, before in ((self.clients, recorded.clients), (self.agents, recorded.agents))
            for name, about in now.items()
            if before.get(name) != about
        ]


def _of(cells: Mapping[str, Mapping[str, Mapping[str, str]]], *names: str) -> str:
    name, api, feature = names
    return cells.get(name, {}).get(api, {}).get(feature, "nothing")
