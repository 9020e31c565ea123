"""Print the seconds that each folder's tests took, from the output of pytest with --durations=0.

``make test-all ARGS=--durations=0 | python tools/test_budget.py``
The rows are those of tests/BUDGET.md: set-up, call and tear-down of all tests of a folder, summed
over the processes that ran them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter

_LINE = re.compile(r"\s*([\d.]+)s (?:setup|call|teardown)\s+(tests\S*?)/?([^/\s]+\.py)::")
_DEPTH = 3  # tests/proxy_ext/api, not the folders below


def main() -> None:
    seconds: Counter[str] = Counter()
    slowest: Counter[str] = Counter()
    for line in sys.stdin:
        sys.stdout.write(line if "::" not in line else "")
        if match := _LINE.match(line):
            taken, folder, file = float(match[1]), match[2], match[3]
            seconds["/".join(folder.split("/")[:_DEPTH])] += taken
            slowest[f"{folder}/{file}"] += taken
    for title, table, most in (("folder", seconds, None), ("file", slowest, 20)):
        print(f"\n| {title} | seconds |\n|---|---|")
        for name, taken in table.most_common(most):
            print(f"| `{name}` | {taken:.0f} |")
    print(f"\n{seconds.total():.0f} seconds of tests in all")


if __name__ == "__main__":
    main()
