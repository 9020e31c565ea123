"""New weights for every rank's engine, without a lost call: pause, load, publish, resume.

They go by a folder (:mod:`.disk`), by a process group (:mod:`.group_transport`) or as tensors in
HTTP bodies (:mod:`.tensor_transport`); the last two send buckets (:mod:`.bucketed`).
"""

from trainer.sync.base import EngineCall, NewWeights, WeightSync
from trainer.sync.select import make_sync

__all__ = ["EngineCall", "NewWeights", "WeightSync", "make_sync"]
