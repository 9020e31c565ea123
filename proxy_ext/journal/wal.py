"""Whether a journal's log holds commits that SQLite would pass over.

SQLite reads the log up to the first frame whose checksum is wrong: after a crash that is the write
that was under way. A frame that was damaged later ends the log just so, and every commit behind it
is gone without a word. Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_HEADER = struct.Struct(">8I")
_FRAME_HEADER = 24
_MAGIC = {0x377F0682: "<u4", 0x377F0683: ">u4"}
"""Which byte order the checksums were made in."""
_FRAMES_AT_ONCE = 256
UNSYNCED = 3
"""Commits in a row that the writer may leave to the next one's fsync: with it, or while one more
is written, a crash of the machine may damage so many of them, and nothing acknowledged is lost."""
_MASK = 0xFFFFFFFF


def has_lost_commits(log: Path) -> bool:
    """Whether what follows the log's readable part is more than a crash can have cut off."""
    if not log.exists() or log.stat().st_size <= _HEADER.size + _FRAME_HEADER:
        return False
    with log.open("rb") as file:
        head = file.read(_HEADER.size)
        magic, _, page_size, _, *salts, sum0, sum1 = _HEADER.unpack(head)
        order = _MAGIC.get(magic)
        if order is None or not 512 <= page_size <= 65536 or page_size & (page_size - 1):
            return True
        sums = _Checksums(order, page_size)
        state = sums.of_header(head)
        if state != (sum0, sum1):
            return True
        readable, commits_behind = True, 0
        size = _FRAME_HEADER + page_size
        while chunk := file.read(size * _FRAMES_AT_ONCE):
            frames = np.frombuffer(chunk, np.uint8)[: len(chunk) // size * size].reshape(-1, size)
            heads = np.ascontiguousarray(frames[:, :_FRAME_HEADER]).view(">u4").astype(int)
            for (_, commit, *found, sum0, sum1), own in zip(
                heads.tolist(), sums.of_frames(frames), strict=True
            ):
                # Frames of an earlier round have other salts: they are in the file already.
                ours = found == salts
                state = sums.after(state, own)
                readable = readable and ours and state == (sum0, sum1)
                commits_behind += not readable and ours and commit != 0
        # The last commit, too, may have been under way: it was not fsynced, nor acknowledged.
        return commits_behind > 1 + UNSYNCED


class _Checksums:
    """SQLite's: two sums over pairs of words, s0 += x + s1 and s1 += y + s0, modulo 2^32.

    That is linear, so a frame's part is a product with fixed factors, and so is what the state
    before it contributes.
    """

    def __init__(self, order: str, page_size: int) -> None:
        self._order = order
        pairs = (8 + page_size) // 2 // 4
        # What a word adds to each sum, from the last pair of words back to the first.
        factors = np.empty((2, pairs, 2), np.uint64)
        power: _Matrix = ((1, 0), (0, 1))
        for k in reversed(range(pairs)):
            for row in (0, 1):
                factors[row, k] = power[row][0] + power[row][1], power[row][1]
            power = _times(power)
        self._factors: npt.NDArray[np.uint64] = factors.reshape(2, -1)
        self._power = power

    def of_header(self, head: bytes) -> tuple[int, int]:
        words = np.frombuffer(head[:24], self._order).tolist()
        s0 = s1 = 0
        for x, y in zip(words[::2], words[1::2], strict=True):
            s0 = (s0 + x + s1) & _MASK
            s1 = (s1 + y + s0) & _MASK
        return s0, s1

    def of_frames(self, frames: npt.NDArray[np.uint8]) -> list[list[int]]:
        """Each frame's own part: of the first 8 bytes of its header, and of its page."""
        summed = np.concatenate([frames[:, :8], frames[:, _FRAME_HEADER:]], axis=1)
        words = summed.view(self._order).astype(np.uint64)
        # Overflow is modulo 2^64, which 2^32 divides.
        parts = (words @ self._factors.T) & np.uint64(_MASK)
        out: list[list[int]] = parts.tolist()
        return out

    def after(self, state: tuple[int, int], own: list[int]) -> tuple[int, int]:
        (a, b), (c, d) = self._power
        s0, s1 = state
        return (a * s0 + b * s1 + own[0]) & _MASK, (c * s0 + d * s1 + own[1]) & _MASK


_Matrix: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


def _times(power: _Matrix) -> _Matrix:
    """The matrix times that of one pair: ((1, 1), (1, 2))."""
    (a, b), (c, d) = power
    return (((a + b) & _MASK, (a + 2 * b) & _MASK), ((c + d) & _MASK, (c + 2 * d) & _MASK))
