"""Run by the interpreter at its start: torchvision beside a torch without GPU.

The wheel's compiled operators do not load there. SGLang needs none, but torchvision wants two of
them declared while it is imported.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    library: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname != "torchvision" or self.library is not None:
            return
        import torch

        # Kept: a library that is collected takes its declarations along.
        self.library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            self.library.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


sys.meta_path.insert(0, _BeforeTorchvision())
