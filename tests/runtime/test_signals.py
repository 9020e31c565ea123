"""Processes that hide what they know from others of their user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, os, subprocess
from any_agent.runtime.signals import hide_from_others

if os.geteuid() == 0:
    # Root may read everything.
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)
reads = ["/bin/cat", f"/proc/{os.getpid()}/environ"]
print(b"SECRET=1" in subprocess.run(reads, capture_output=True).stdout)
hide_from_others()
done = subprocess.run(reads, capture_output=True)
print(done.returncode != 0, done.stdout)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")
def test_other_processes_cannot_read_the_environment_of_a_hidden_one() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"SECRET": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True\nTrue b''\n", done.stderr
