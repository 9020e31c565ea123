"""``python -m any_agent.sdk.command_grader [--check] module.function``: a grader's own process.

It reads the session as JSON from standard input and prints the reward as the last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from any_agent.grading import find, grade


def main(argv: Sequence[str]) -> int:
    if argv[0] == "--check":
        worked, said = find(argv[1])
    else:
        worked, said = grade(argv[0], json.load(sys.stdin))
    if not worked:
        print(said, file=sys.stderr)
        return 1
    print(f"\n{json.dumps(said)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
