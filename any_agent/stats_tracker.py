"""Statistics of training and of workflows by name: averages, sums, extremes.

Values are added up when they are recorded, so memory does not grow with their number. Recording is
quick and thread-safe, for workflows, reward functions and the trainer alike. Trackers with names
are independent of each other, and so are their scopes, which belong to the task or thread that
entered them.

    stats_tracker.get("rollout").scalar(reward=1.0)     rollout/reward, rollout/reward__count
    with stats_tracker.scope("actor"):
        stats_tracker.denominator(tokens=mask)          actor/tokens
        stats_tracker.stat(loss=loss, denominator="tokens")
                                                        actor/loss/avg, .../min, .../max
"""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MAX_KEYS = 4096
"""The most keys of one tracker: ids in names would otherwise fill memory and metrics files."""
MAX_TRACKERS = 256


class ReduceType(Enum):
    """The way in which the values of one key are combined."""

    AVG_MIN_MAX = "avg_min_max"
    """``key/avg``, ``key/min`` and ``key/max``."""
    AVG = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SCALAR = "scalar"
    """``key``, the mean, and ``key__count``, the number of values."""


@dataclass(slots=True)
class _Sums:
    kind: ReduceType
    total: float = 0.0
    count: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, total: float, count: int, low: float, high: float) -> None:
        self.total += total
        self.count += count
        self.low = min(self.low, low)
        self.high = max(self.high, high)

    def results(self, key: str) -> dict[str, float]:
        """Return the exported values; none if nothing was recorded."""
        if self.kind is ReduceType.SUM:
            return {key: self.total}
        if not self.count:
            return {}
        mean = self.total / self.count
        if self.kind is ReduceType.SCALAR:
            return {key: mean, f"{key}__count": self.count}
        if self.kind is ReduceType.AVG_MIN_MAX:
            return {f"{key}/avg": mean, f"{key}/min": self.low, f"{key}/max": self.high}
        one = {ReduceType.AVG: mean, ReduceType.MIN: self.low, ReduceType.MAX: self.high}
        return {key: one[self.kind]}


class StatsTracker:
    """The statistics of one name, which is the outermost scope of its keys."""

    def __init__(self, name: str = "") -> None:
        self._root = (name.strip("/"),) if name.strip("/") else ()
        self._scopes: ContextVar[tuple[str, ...]] = ContextVar("scopes")
        self._lock = threading.Lock()
        self._sums: dict[str, _Sums] = {}
        self._masks: dict[str, npt.NDArray[np.bool_]] = {}
        self._warned: set[str] = set()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the keys recorded inside with ``name/``; scopes nest."""
        token = self._scopes.set((*self._scopes.get(self._root), name.strip("/")))
        try:
            yield
        finally:
            self._scopes.reset(token)

    @contextmanager
    def disable_scope(self) -> Iterator[None]:
        """Record the keys inside without any scope."""
        token = self._scopes.set(())
        try:
            yield
        finally:
            self._scopes.reset(token)

    def scope_func_wrapper(self, name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Return a decorator that runs a function in this scope."""

        def decorated(function: Callable[P, T]) -> Callable[P, T]:
            @functools.wraps(function)
            def scoped(*args: P.args, **kwargs: P.kwargs) -> T:
                with self.scope(name):
                    return function(*args, **kwargs)

            return scoped

        return decorated

    def scalar(self, **values: Any) -> None:
        """Record one value for each key; means and counts are exported.

        A value that is not finite is left out, and logged once, because it would spoil the mean.
        Raises TypeError or ValueError for a value that is no number.
        """
        for key, value in values.items():
            self._number(self._key(key), float(value), ReduceType.SCALAR)

    @contextmanager
    def record_timing(self, key: str) -> Iterator[None]:
        """Record the seconds that the block takes as a scalar ``timeperf/<key>``, in any scope."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._number(f"timeperf/{key}", time.perf_counter() - begun, ReduceType.SCALAR)

    def denominator(self, **masks: Any) -> None:
        """Record masks, boolean tensors or arrays, for :meth:`stat`; the number of True is
        exported.

        Raises ValueError for a mask that is empty or not boolean.
        """
        for key, value in masks.items():
            mask = _array(key, value)
            if mask.dtype != np.bool_ or not mask.size:
                raise ValueError(
                    f"denominator {key} is {mask.dtype.name} of the shape {list(mask.shape)}: it "
                    "must be bool, and not empty"
                )
            full, n = self._key(key), int(mask.sum())
            with self._lock:
                if self._add(full, ReduceType.SUM, float(n), n, n, n):
                    self._masks[full] = mask.copy()

    def stat(self, denominator: str, reduce_type: ReduceType | None = None, **values: Any) -> None:
        """Record the entries of float tensors or arrays where the latest mask of this name is True.

        ``key/avg``, ``key/min`` and ``key/max`` are exported, or the value that ``reduce_type``
        names. Entries that are not finite are left out, as by :meth:`scalar`. Raises ValueError
        without such a mask, and for a mask of another shape.
        """
        kind = reduce_type or ReduceType.AVG_MIN_MAX
        if not isinstance(kind, ReduceType) or kind is ReduceType.SCALAR:
            raise ValueError(f"reduce_type is {kind}: it must be a ReduceType other than SCALAR")
        full_mask = self._key(denominator)
        for key, value in values.items():
            array = _array(key, value)
            if not np.issubdtype(array.dtype, np.floating):
                raise ValueError(f"stat {key} is {array.dtype.name}: it must be of floats")
            full = self._key(key)
            with self._lock:
                mask = self._masks.get(full_mask)
                if mask is None:
                    raise ValueError(f"there is no denominator {full_mask}: record it first")
                if mask.shape != array.shape:
                    raise ValueError(
                        f"stat {key} has the shape {list(array.shape)}, its denominator "
                        f"{denominator} {list(mask.shape)}: they must be the same"
                    )
                chosen = array[mask].astype(np.float64)
                finite = np.isfinite(chosen)
                if not finite.all():
                    first = float(chosen[~finite][0])
                    self._warn(full, f"{full} was {first}, which is left out of its mean")
                    chosen = chosen[finite]
                extremes = (chosen.min(), chosen.max()) if chosen.size else (math.inf, -math.inf)
                self._add(full, kind, float(chosen.sum()), chosen.size, *map(float, extremes))

    def export(
        self, key: str | None = None, reduce_group: Any = None, reset: bool = True
    ) -> dict[str, float]:
        """Return all values since the last reset, or only those of ``key`` in the current scope.

        With ``reduce_group``, a process group of torch.distributed, values are combined over all of
        its processes, each of which must call this.
        """
        with self._lock:
            only = None if key is None else self._key(key)
            chosen = {k: sums for k, sums in self._sums.items() if only in (None, k)}
            if reset:
                for name in chosen:
                    del self._sums[name]
                    self._masks.pop(name, None)
        if reduce_group is not None:
            chosen = _gathered(chosen, reduce_group)
        return {k: v for name in chosen for k, v in chosen[name].results(name).items()}

    def _key(self, key: str) -> str:
        return "/".join((*self._scopes.get(self._root), key))

    def _number(self, key: str, value: float, kind: ReduceType) -> None:
        with self._lock:
            if math.isfinite(value):
                self._add(key, kind, value, 1, value, value)
            else:
                self._warn(key, f"{key} was {value}, which is left out of its mean")

    def _add(
        self, key: str, kind: ReduceType, total: float, count: int, low: float, high: float
    ) -> bool:
        sums = self._sums.get(key)
        if sums is None:
            if len(self._sums) >= MAX_KEYS:
                self._warn("", f"more than {MAX_KEYS} keys: {key} and others are not recorded")
                return False
            sums = self._sums[key] = _Sums(kind)
        sums.kind = kind
        sums.add(total, count, low, high)
        return True

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned and len(self._warned) < MAX_KEYS:
            self._warned.add(about)
            log.warning("%s", text)


def _array(key: str, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        detached = value.detach().cpu()
        # numpy has no bfloat16.
        return np.asarray((detached.float() if detached.is_floating_point() else detached).numpy())
    raise ValueError(f"{key} is a {type(value).__name__}: it must be a tensor or an array")


def _gathered(own: Mapping[str, _Sums], group: Any) -> dict[str, _Sums]:
    import torch
    import torch.distributed as dist

    figures = {k: (s.kind.value, s.total, s.count, s.low, s.high) for k, s in own.items()}
    text = json.dumps(figures).encode()
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"

    def everywhere(tensor: Any) -> list[Any]:
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, tensor, group=group)
        return found

    # As text in tensors: the library would pickle objects.
    sizes = [int(size) for size in everywhere(torch.tensor([len(text)], device=device))]
    padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8).to(device)
    out: dict[str, _Sums] = {}
    for theirs in everywhere(padded):
        for key, (kind, *sums) in json.loads(bytes(theirs.cpu().numpy())).items():
            out.setdefault(key, _Sums(ReduceType(kind))).add(*sums)
    return out


_default = StatsTracker()
_trackers: dict[str, StatsTracker] = {"": _default}
_lock = threading.Lock()

scalar = _default.scalar
stat = _default.stat
denominator = _default.denominator
scope = _default.scope
disable_scope = _default.disable_scope
scope_func_wrapper = _default.scope_func_wrapper
record_timing = _default.record_timing
export = _default.export


def get(name: str = "") -> StatsTracker:
    """Return the tracker of this name, always the same one; without a name the module's own.

    Raises ValueError when there are too many trackers.
    """
    with _lock:
        if name not in _trackers and len(_trackers) >= MAX_TRACKERS:
            raise ValueError(
                f"there are {MAX_TRACKERS} trackers already, so {name[:80]!r} cannot be added: use "
                "few names, and scopes within them"
            )
        return _trackers.setdefault(name, StatsTracker(name))


def export_all(reduce_group: Any = None, reset: bool = True) -> dict[str, float]:
    """Return the values of all trackers by full keys, as :meth:`StatsTracker.export` does.

    All processes of a ``reduce_group`` must have the same trackers.
    """
    with _lock:
        trackers = [_trackers[name] for name in sorted(_trackers)]
    out: dict[str, float] = {}
    for tracker in trackers:
        out |= tracker.export(reduce_group=reduce_group, reset=reset)
    return out
