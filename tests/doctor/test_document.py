"""docs/how-to/doctor.md names what there is."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

from any_agent import doctor
from any_agent.doctor.verdict import Check, CheckOutcome

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "doctor.md").read_text()


def test_the_document_explains_every_law_and_every_verdict() -> None:
    modules = [m.name for m in pkgutil.iter_modules(doctor.__path__)]
    laws = {
        value.name
        for name in modules
        for value in vars(importlib.import_module(f"{doctor.__name__}.{name}")).values()
        if isinstance(value, Check)
    }
    assert len(laws) > 10
    named = set(re.findall(r"^\| `([\w ]+)` \|", TEXT, re.M))
    assert named == laws | {outcome.value for outcome in CheckOutcome}
