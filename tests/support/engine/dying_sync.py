"""A trainer killed as it sends weights.

Run it by ``-m tests.support.engine.dying_sync MODEL FOLDER VERSION URL...``.

It sends MODEL's weights as VERSION to the engines at the URLs, and dies in the second bucket, of
which one tensor is out.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from any_agent.engine.weight_process_group import WeightGroup
from tests.support.engine.sync import Fleet, Weights, syncing


def main() -> None:
    model, folder, version, *urls = sys.argv[1:]
    whole, begun = WeightGroup.broadcast, 0

    def dying(self: WeightGroup, tensors: Sequence[Tensor]) -> None:
        nonlocal begun
        begun += 1
        if begun == 2:
            whole(self, tensors[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, tensors)

    WeightGroup.broadcast = dying  # type: ignore[method-assign]
    new = Weights(Path(model), Path(folder), "float32").version(int(version))
    with syncing("distributed", dtype="float32") as sync:
        sync.prepare(new)
        sync.update(Fleet(*urls), new)


if __name__ == "__main__":
    main()
