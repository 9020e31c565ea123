"""Weights as tensors in HTTP bodies; on a GPU that trainer and engine share, by its memory alone.

There only handles travel (CUDA IPC), and the engine copies from the trainer's memory to its own.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from any_agent.engine.weight_serialization import cuda_reduction, pack
from trainer.sync.base import Bucket
from trainer.sync.engine_client import EngineClient


class TensorTransport:
    """Each engine is told by itself."""

    async def open(self, engines: Sequence[EngineClient], *, cuda: bool) -> None:
        """Nothing is needed."""

    async def send(self, engines: Sequence[EngineClient], bucket: Bucket, name: str) -> None:
        async def give(engine: EngineClient) -> None:
            # The handles of one body are good for one reader, so each gets its own.
            body = await asyncio.to_thread(_body, engine, bucket)
            body |= {"flush_cache": False, "weight_version": name}
            await engine.post("/update_weights_from_tensor", body)

        results = await asyncio.gather(*map(give, engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def drop(self) -> None:
        """Nothing is kept."""


def _body(engine: EngineClient, bucket: Bucket) -> dict[str, Any]:
    if engine.about.embedded:
        # Only an engine on a GPU can read another process's GPU.
        here = bucket if engine.about.cuda else [(name, tensor.cpu()) for name, tensor in bucket]
        how, text = pack(here)
        return {"load_format": how, "serialized_named_tensors": [text]}
    return {"serialized_named_tensors": [pickled(bucket) for _ in range(engine.about.processes)]}


def pickled(bucket: Bucket) -> str:
    """A bucket as SGLang takes it: base64 of a pickle of ``[(name, tensor), ...]``.

    It is only ever written here; SGLang reads it by a list of allowed types. GPU tensors as handles
    of their memory, others with their values.
    """
    raw = io.BytesIO()
    _Pickler(raw, protocol=pickle.HIGHEST_PROTOCOL).dump(
        [(name, tensor.detach().contiguous()) for name, tensor in bucket]
    )
    return base64.b64encode(raw.getvalue()).decode()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            from torch.multiprocessing.reductions import rebuild_cuda_tensor

            # SGLang has put a function in this one's place that takes the device by its UUID.
            rebuild: Callable[..., Tensor] = rebuild_cuda_tensor
            return rebuild, tuple(cuda_reduction(value))
        return NotImplemented
