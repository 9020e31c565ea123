"""docs/how-to/doctor.md names what there is."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

from any_agent import doctor
from any_agent.doctor.verdict import Check, CheckOutcome

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "doctor.md").read_text()


def test_it_explains_every_law_and_every_verdict() -> None:
    modules = [m.name for m in pkgutil.iter_modules(doctor.__path__)]
    found = [
        getattr(importlib.import_module(f"{doctor.__name__}.{name}"), "LAW", None)
        for name in modules
    ]
    laws = {law.name for law in found if isinstance(law, Check)}
    assert len(laws) > 10
    named = set(re.findall(r"^\| `([\w ]+)` \|", TEXT, re.M))
    assert named == laws | {outcome.value for outcome in CheckOutcome}
