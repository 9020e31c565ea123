"""Without CAMEL-AI its adapter says what to install; with it: tests/clients/camel_rlvr."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support.errors import fails_with


def test_without_camel_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("any_agent.camel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "camel.models", None)
    monkeypatch.setitem(sys.modules, "camel", None)
    with fails_with(ModuleNotFoundError, "camel-ai"):
        importlib.import_module("any_agent.camel")
