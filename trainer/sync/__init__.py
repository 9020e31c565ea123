"""New weights to every rank's engine, without a call lost: pause, load, publish, resume.

By a folder (:mod:`.disk`), by a process group (:mod:`.distributed`), or as tensors
(:mod:`.tensor`); the last two send buckets (:mod:`.bucketed`).
"""

from trainer.sync.base import EngineCall, NewWeights, WeightSync
from trainer.sync.select import make_sync

__all__ = ["EngineCall", "NewWeights", "WeightSync", "make_sync"]
