"""`python -m any_agent.cli`: the same as `any-agent`."""

import sys

from any_agent.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
