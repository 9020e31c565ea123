"""The pages of docs/how-to/connect and their code, each block named by a comment before it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "connect"
_NAMED = re.compile(r"^<!-- test: ([a-z-]+) -->\n```(\w+)\n(.*?)^```$", re.M | re.S)
_FENCE = re.compile(r"^\s*(?:```+|~~~+)", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    """The page's file name without `.md`."""
    name: str
    language: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}/{self.name}"


def pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page; AssertionError where one has no name before it."""
    text = page.read_text(encoding="utf-8")
    found = [Block(page.stem, *match) for match in _NAMED.findall(text)]
    fences = len(_FENCE.findall(text))
    assert fences == 2 * len(found), (
        f"{page.name} has {fences / 2:g} blocks, of which {len(found)} are named: write"
        " `<!-- test: NAME -->` on the line before each"
    )
    return found


def all_blocks() -> dict[str, Block]:
    found = [block for page in pages() for block in blocks(page)]
    names = [block.place for block in found]
    assert len(names) == len(set(names)), f"a name is there twice: {sorted(names)}"
    return {block.place: block for block in found}
