"""Weights in memory and as bytes: alignment, checksums, and unpickled tensors in HTTP bodies.

A bucket for the embedded engine is sent as safetensors, or, if trainer and engine share a GPU, as
handles of its memory there, from which the engine copies.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import orjson
import torch
from torch import Tensor

from any_agent.errors import InvalidRequest

Named: TypeAlias = Sequence[tuple[str, Tensor]]
Format: TypeAlias = Literal["safetensors", "cuda_ipc"]

# Indices of `torch.multiprocessing.reductions.rebuild_cuda_tensor`'s arguments.
_CLASS, _SIZE, _STRIDE, _STORAGE, _DTYPE, _DEVICE = 0, 1, 2, 4, 5, 6
_BYTES = (7, 11, 13)


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of the values' bytes in C order, 8 hexadecimal digits."""
    # No copy of a tensor whose bytes are in order already.
    raw: Any = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(raw):08x}"


def checksums(named: Named) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in named}


def pack(named: Named) -> tuple[Format, str]:
    """Encode a bucket for one engine; return the format and the text.

    Handles are valid as long as the tensors live, and for one reader.
    """
    if all(tensor.is_cuda for _, tensor in named):
        return "cuda_ipc", _text(orjson.dumps([_handle(name, t) for name, t in named]))
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
    return "safetensors", _text(save(tensors))


def unpack(how: str, text: str) -> dict[str, Tensor]:
    """Decode the text of :func:`pack` into copies; InvalidRequest for any other text."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        raw = base64.b64decode(text, validate=True)
        if how == "safetensors":
            found: dict[str, Tensor] = load(raw)
            return found
        if how == "cuda_ipc":
            return dict(_from_handle(entry) for entry in orjson.loads(raw))
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise InvalidRequest(f"the tensors are not in the format {how}: {error}") from error
    raise InvalidRequest(
        f"load_format must be safetensors or cuda_ipc, not {how!r}: this engine unpickles nothing",
        param="load_format",
    )


def cuda_reduction(tensor: Tensor) -> list[Any]:
    """Return ``rebuild_cuda_tensor``'s arguments for another process.

    The device is given by its UUID: its number may differ there, by CUDA_VISIBLE_DEVICES.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]
    arguments = list(arguments)
    arguments[_DEVICE] = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
    return arguments


def _handle(name: str, tensor: Tensor) -> list[Any]:
    arguments = cuda_reduction(tensor)
    arguments[_CLASS] = arguments[_STORAGE] = None
    arguments[_SIZE], arguments[_STRIDE] = list(tensor.shape), list(tensor.stride())
    arguments[_DTYPE] = str(tensor.dtype).removeprefix("torch.")
    for place in _BYTES:
        arguments[place] = _text(arguments[place])
    return [name, arguments]


def _from_handle(entry: Any) -> tuple[str, Tensor]:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    name, arguments = entry
    if not isinstance(name, str) or not isinstance(arguments, list):
        raise TypeError("a handle must have a name and arguments")
    arguments[_CLASS], arguments[_STORAGE] = torch.Tensor, torch.storage.TypedStorage
    arguments[_DTYPE] = dtype_of(arguments[_DTYPE])
    arguments[_DEVICE] = _device_number(arguments[_DEVICE])
    for place in _BYTES:
        arguments[place] = base64.b64decode(arguments[place], validate=True)
    shared: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return name, shared.clone()


def dtype_of(name: Any) -> torch.dtype:
    """Return the type named ``float32`` or ``torch.float32``; InvalidRequest for no such type."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidRequest(f"there is no dtype {name!r}", param="dtypes")
    return found


def _device_number(uuid: str) -> int:
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise ValueError(f"this process does not see the GPU {uuid}")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


_ALIGNMENT = 64  # bytes to which PyTorch aligns memory on the CPU


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where PyTorch would place it.

    The memory of a mapped file may be aligned otherwise, and then sums are taken in another order:
    two processes give bit-identical logits only if both have aligned weights.
    """
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def align(model: Any) -> None:
    """Align all parameters in place; the objects stay, so tied parameters stay tied."""
    for parameter in model.parameters():
        parameter.data = aligned(parameter.data)
