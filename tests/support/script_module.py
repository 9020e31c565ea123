"""A script of the repository that is in no package, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: str, name: str | None = None) -> ModuleType:
    """Run the file at this path of the repository, and return its module."""
    spec = importlib.util.spec_from_file_location(name or Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A frozen dataclass looks its module up while it is made.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
