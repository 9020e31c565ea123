"""New weights for every rank's engine, without a lost call: pause, load, publish, resume.

They go by a folder (:mod:`.disk`), or in buckets (:mod:`.bucketed`), over a process group or as
tensors in HTTP bodies (:mod:`.transports`).
"""

from trainer.sync.base import EngineCall, NewWeights, WeightSync
from trainer.sync.select import make_sync

__all__ = ["EngineCall", "NewWeights", "WeightSync", "make_sync"]
