"""`python -m any_agent.cli`: the same as `any-agent`."""

import os
import sys

from any_agent.cli.main import main

if __name__ == "__main__":
    # Child processes import the packages that this process found, installed or not.
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    sys.exit(main())
