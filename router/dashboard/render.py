"""The templates, which escape every value that they show."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from any_agent.runtime.reasons import reason_text
from router.dashboard.chart import number_text

_CLOCK_ERROR = 5.0  # seconds by which machines' clocks may differ


@cache
def environment() -> Environment:
    """Return the environment; its templates are compiled when they are first used."""
    made = Environment(
        loader=PackageLoader("router.dashboard"),
        # All of them are HTML, whatever their names.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"number": number_text, "ago": ago, "span": span, "utc": utc}
    made.filters["reason"] = reason_text
    made.globals["static"] = static_link
    return made


def compile_templates() -> None:
    """Compile all templates, so that no visitor waits for it: tens of milliseconds."""
    for name in environment().list_templates():
        environment().get_template(name)


def page(name: str, **values: Any) -> bytes:
    """Return a page; it takes milliseconds, so call it in a thread."""
    # Halves of characters, which JSON may hold, are not text.
    return environment().get_template(name).render(**values).encode(errors="replace")


@cache
def static_files() -> dict[str, bytes]:
    """Return the contents of the style sheet, the modules and the icon by name."""
    folder = files("router.dashboard").joinpath("static")
    return {Path(each.name).name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


@cache
def static_version(name: str) -> str:
    """Return the digest of a static file; KeyError for an unknown one."""
    return hashlib.sha256(static_files()[name]).hexdigest()[:16]


def static_link(name: str) -> str:
    """Return the path of a static file; it changes with the content, so browsers may keep it."""
    return f"/ui/static/{name}?v={static_version(name)}"


def span(seconds: float | None) -> str:
    """Return a length of time in the unit that fits it."""
    if seconds is None:
        return "–"
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def ago(at: float | None) -> str:
    """Return the time since a moment, or until it where the other machine's clock is ahead."""
    if at is None:
        return "–"
    seconds = time.time() - at
    if seconds < -_CLOCK_ERROR:
        return f"in {span(-seconds)}"
    return "just now" if seconds < 1 else f"{span(seconds)} ago"


def utc(at: float | None) -> str:
    """Return a moment as text."""
    return "–" if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
