"""A check of a journal's log for commits that SQLite would silently drop.

SQLite reads the log up to the first frame with a wrong checksum: after a crash that is the write
that was under way. A frame that was damaged later ends the log in the same way, and every commit
after it is silently lost. Format: https://www.sqlite.org/fileformat2.html#walformat
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
"""The byte order of the checksums by the log's magic number."""
_FRAMES_AT_ONCE = 256
UNSYNCED = 3
"""Commits in a row that the writer may leave to the fsync of the next one. A crash of the machine
may damage that many without the loss of anything acknowledged."""
_MASK = 0xFFFFFFFF


def has_lost_commits(log: Path) -> bool:
    """Return whether the log has more commits after its readable part than a crash can damage."""
    if not log.exists() or log.stat().st_size <= _HEADER.size + _FRAME_HEADER:
        return False
    with log.open("rb") as file:
        head = file.read(_HEADER.size)
        magic, _, page_size, _, *salts, sum0, sum1 = _HEADER.unpack(head)
        order = _MAGIC.get(magic)
        if order is None or not 512 <= page_size <= 65536 or page_size & (page_size - 1):
            return True
        sums = _Checksums(order, page_size)
        state = sums.header_sums(head)
        if state != (sum0, sum1):
            return True
        readable, commits_behind = True, 0
        size = _FRAME_HEADER + page_size
        while chunk := file.read(size * _FRAMES_AT_ONCE):
            frames = np.frombuffer(chunk, np.uint8)[: len(chunk) // size * size].reshape(-1, size)
            heads = np.ascontiguousarray(frames[:, :_FRAME_HEADER]).view(">u4").astype(int)
            for (_, commit, *found, sum0, sum1), own in zip(
                heads.tolist(), sums.frame_shares(frames), strict=True
            ):
                # Frames of an earlier round have other salts: the file has their pages already.
                ours = found == salts
                state = sums.after(state, own)
                readable = readable and ours and state == (sum0, sum1)
                commits_behind += not readable and ours and commit != 0
        # The last commit may have been under way as well, neither fsynced nor acknowledged.
        return commits_behind > 1 + UNSYNCED


class _Checksums:
    """SQLite's checksums: two sums over pairs of words, s0 += x + s1 and s1 += y + s0, mod 2^32.

    They are linear, so both a frame's share and the previous state's are products with fixed
    factors.
    """

    def __init__(self, order: str, page_size: int) -> None:
        self._order = order
        pairs = (8 + page_size) // 2 // 4
        # The factor of each word in each sum, from the last pair of words back to the first.
        factors = np.empty((2, pairs, 2), np.uint64)
        power: _Matrix = ((1, 0), (0, 1))
        for k in reversed(range(pairs)):
            for row in (0, 1):
                factors[row, k] = power[row][0] + power[row][1], power[row][1]
            power = _times(power)
        self._factors: npt.NDArray[np.uint64] = factors.reshape(2, -1)
        self._power = power

    def header_sums(self, head: bytes) -> tuple[int, int]:
        words = np.frombuffer(head[:24], self._order).tolist()
        s0 = s1 = 0
        for x, y in zip(words[::2], words[1::2], strict=True):
            s0 = (s0 + x + s1) & _MASK
            s1 = (s1 + y + s0) & _MASK
        return s0, s1

    def frame_shares(self, frames: npt.NDArray[np.uint8]) -> list[list[int]]:
        """Return each frame's share: of the first 8 bytes of its header, and of its page."""
        summed = np.concatenate([frames[:, :8], frames[:, _FRAME_HEADER:]], axis=1)
        words = summed.view(self._order).astype(np.uint64)
        # Overflow is modulo 2^64, a multiple of 2^32.
        parts = (words @ self._factors.T) & np.uint64(_MASK)
        out: list[list[int]] = parts.tolist()
        return out

    def after(self, state: tuple[int, int], own: list[int]) -> tuple[int, int]:
        (a, b), (c, d) = self._power
        s0, s1 = state
        return (a * s0 + b * s1 + own[0]) & _MASK, (c * s0 + d * s1 + own[1]) & _MASK


_Matrix: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


def _times(power: _Matrix) -> _Matrix:
    """Return the product with the matrix of one pair of words, ((1, 1), (1, 2))."""
    (a, b), (c, d) = power
    return (((a + b) & _MASK, (a + 2 * b) & _MASK), ((c + d) & _MASK, (c + 2 * d) & _MASK))
