"""`python -m any_agent.cli`: the same as `any-agent`."""

import sys

from any_agent.cli.main import main
from any_agent.runtime.command_line import share_module_path

if __name__ == "__main__":
    share_module_path()
    sys.exit(main())
