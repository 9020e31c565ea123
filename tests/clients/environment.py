"""Environments of the clients that are tried: their pins collide with each other and with ours."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv-clients"


def python_with(name: str, *requirements: str) -> Path:
    """The interpreter of an environment of this name that holds just these; made if need be."""
    wanted = hashlib.blake2b("\n".join(requirements).encode(), digest_size=6).hexdigest()
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / f".made-{wanted}"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=120)
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements], check=True, timeout=600)
        stamp.touch()
    return python
