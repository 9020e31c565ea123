"""The worked examples of docs/how-to/extend.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extend.md"


def code_of(title: str) -> str:
    """Return the Python code of a section."""
    section = PAGE.read_text("utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def run_code_of(title: str) -> dict[str, Any]:
    """Run the code of a section and return its names."""
    names: dict[str, Any] = {"__name__": "extend_page"}
    exec(compile(code_of(title), str(PAGE), "exec", dont_inherit=True), names)
    return names
