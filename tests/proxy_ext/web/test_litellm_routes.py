"""The table of LiteLLM's routes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from any_agent.auth.access import Scope
from proxy_ext.web.permissions import AGENTS, LITELLM_SCOPES, RULES, LiteLLMRoutes, template_of

ROOT = Path(__file__).resolve().parents[3]
_LIST = """
import json
from tools.docs.litellm_routes import to_list
print("LIST", json.dumps(sorted(to_list())))
"""


@pytest.fixture(scope="module")
def table() -> LiteLLMRoutes:
    return LiteLLMRoutes()


@pytest.mark.service
def test_the_route_table_lists_what_the_installed_litellm_serves(table: LiteLLMRoutes) -> None:
    # LiteLLM's app is module globals, and its late parts would stay loaded here.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _LIST],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("LIST "))
    installed = {(method, path) for method, path in json.loads(line.removeprefix("LIST "))}
    new, gone = installed - table.rules.keys(), table.rules.keys() - installed
    remedy = "run tools/docs/litellm_routes.py, and look at the scope of each new line"
    assert not new, f"LiteLLM has new routes, which are closed: {sorted(new)}; {remedy}"
    assert not gone, f"LiteLLM has these routes no more: {sorted(gone)}; {remedy}"


def test_no_route_of_ours_is_in_the_table(table: LiteLLMRoutes) -> None:
    assert not table.rules.keys() & RULES.keys()
    # Our templates answer all methods of the paths that they fit, so that no such line can apply.
    one_part = (path for _, path in table.rules if ":path}" not in path)
    assert not [p for p in one_part if template_of(re.sub(r"\{[^}]*\}", "x", p)) is not None]


def test_a_route_is_as_open_as_the_table_says(table: LiteLLMRoutes) -> None:
    """No wider template, which LiteLLM might take first, closes one to agents; none opens one."""
    for (method, path), scope in table.rules.items():
        found = table.rule(method, re.sub(r"\{[^}]*\}", "x", path))
        assert found is not None, (method, path)
        allowed = found[1].scopes
        assert allowed <= LITELLM_SCOPES[scope], (method, path)
        if scope == "inference":
            assert allowed == AGENTS, (method, path)
        else:
            assert allowed == {Scope.ADMIN}, (method, path)
        assert not allowed & {Scope.NONE, Scope.JUDGE, Scope.TRAINER}, (method, path)


def test_another_spelling_of_a_path_is_no_route_for_agents(table: LiteLLMRoutes) -> None:
    for path in (
        "//key/generate",
        "/key/generate/",
        "/v1/../key/generate",
        "/v1/%2e%2e/key/generate",
        "/KEY/generate",
        "/key/generate;x",
        "/v1//moderations",
        "/v1/moderations/",
    ):
        found = table.rule("POST", path)
        assert found is None or found[1].scopes == LITELLM_SCOPES["admin"], path
