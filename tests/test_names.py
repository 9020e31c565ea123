"""pytest imports a test by its base name, unless its folder is a package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent


def test_base_names_are_unique() -> None:
    files = [
        file.stem
        for file in {
            f for kind in ("test_*.py", "*_lab.py", "*_live.py") for f in TESTS.rglob(kind)
        }
        if not (file.parent / "__init__.py").exists()
    ]
    assert [name for name, times in Counter(files).items() if times > 1] == []
