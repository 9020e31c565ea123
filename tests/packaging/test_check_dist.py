"""`make dist` notices a wheel that lacks something, or has too much."""

from __future__ import annotations

import subprocess
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.errors import fails_with
from tests.support.script_module import load_script

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("any_agent", "proxy_ext", "router", "trainer")
REQUIRED = ["aiohttp>=3", "httpx>=0.28", "pydantic>=2.11", "pyyaml>=6"]
EXTRA = ['redis[hiredis]>=8; extra == "redis"', 'torch>=2; extra == "serve"']


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_script("tools/check_dist.py")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def wheel_of(path: Path, names: list[str], required: list[str]) -> Path:
    """Return a wheel with these files, all empty, that asks for these packages."""
    lines = ["Metadata-Version: 2.4", "Name: any-agent-rl", "Version: 1"]
    lines += ["Provides-Extra: redis", "Provides-Extra: serve"]
    lines += [f"Requires-Dist: {each}" for each in required]
    wheel = path / "any_agent_rl-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in names:
            files.writestr(name, "")
        files.writestr("any_agent_rl-1.dist-info/METADATA", "\n".join(lines) + "\n\ntext\n")
    return wheel


def test_a_wheel_has_all_that_it_needs_and_no_more(
    check: ModuleType, tracked: list[str], tmp_path: Path
) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(tracked)
    wheel = wheel_of(tmp_path, tracked, REQUIRED + EXTRA)
    check.check_wheel(wheel, check.metadata_of(wheel))
    template = next(n for n in tracked if n.endswith(".html"))
    cases = [
        ([n for n in tracked if n != template], REQUIRED, template),
        ([*tracked, "tests/__init__.py"], REQUIRED, "tests"),
        (tracked, [*REQUIRED, "torch>=2"], "5 dependencies"),
    ]
    for names, required, said in cases:
        wheel = wheel_of(tmp_path, names, required)
        with fails_with(check.Failed, said):
            check.check_wheel(wheel, check.metadata_of(wheel))
    metadata = check.metadata_of(wheel_of(tmp_path, tracked, REQUIRED + EXTRA))
    assert check.requirements(metadata, "light") == ["aiohttp", "httpx", "pydantic", "pyyaml"]
    assert check.requirements(metadata, "redis") == ["redis"]


def test_every_extra_of_the_project_can_be_tried(check: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {*project["optional-dependencies"]} - check.DEVELOPERS
    assert extras == {*check.CHECKS, *check._IMPORTS} - {check.LIGHT}
