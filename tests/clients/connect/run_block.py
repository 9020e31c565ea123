"""Runs a Python block as its author's program: `run_block.py REPOSITORY SDK PROGRAM`.

The framework's environment comes first, then the SDK's bare one (folder ``SDK``), as if
`pip install any-agent-rl` had been run in the framework's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

repository, sdk, program = sys.argv[1:]
sys.argv = [program]
sys.path.insert(0, str(Path(program).parent))
sys.path += [sdk, repository]
runpy.run_path(program, run_name="__main__")
