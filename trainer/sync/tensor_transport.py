"""Weights as tensors in HTTP bodies, or as handles of GPU memory.

On a GPU that trainer and engine share only handles travel (CUDA IPC), and the engine copies from
the trainer's memory to its own.
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
    """Sends each engine its own HTTP request."""

    async def open(self, engines: Sequence[EngineClient], *, cuda: bool) -> None:
        """Do nothing: requests need no preparation."""

    async def send(self, engines: Sequence[EngineClient], bucket: Bucket, name: str) -> None:
        async def post(engine: EngineClient) -> None:
            # The handles of one body are good for one reader, so each gets its own.
            body = await asyncio.to_thread(_body, engine, bucket)
            body |= {"flush_cache": False, "weight_version": name}
            await engine.post("/update_weights_from_tensor", body)

        results = await asyncio.gather(*map(post, engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def drop(self) -> None:
        """Do nothing: there is no connection."""


def _body(engine: EngineClient, bucket: Bucket) -> dict[str, Any]:
    if engine.info.embedded:
        # Only an engine on a GPU can read another process's GPU.
        here = bucket if engine.info.cuda else [(name, tensor.cpu()) for name, tensor in bucket]
        how, text = pack(here)
        return {"load_format": how, "serialized_named_tensors": [text]}
    return {"serialized_named_tensors": [pickled(bucket) for _ in range(engine.info.processes)]}


def pickled(bucket: Bucket) -> str:
    """Encode a bucket for SGLang: base64 of a pickle of ``[(name, tensor), ...]``.

    Such text is only written here, never read; SGLang reads it by a list of allowed types. GPU
    tensors are handles of their memory, others have their values.
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

            # SGLang replaces this function by one that takes the device by its UUID.
            rebuild: Callable[..., Tensor] = rebuild_cuda_tensor
            return rebuild, tuple(cuda_reduction(value))
        return NotImplemented
