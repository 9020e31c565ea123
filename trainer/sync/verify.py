"""Verification that an engine has the weights that were sent; a status code is no proof.

The embedded engine reports checksums of a checkpoint's own tensors, so they must equal those of
the tensors sent. SGLang's are of its own layout (fused, cut, perhaps quantised). There an engine's
first update is compared with what its own loader makes of the same version's folder, after the
weights were made random in between; later updates are compared with the other engines.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from any_agent.errors import EngineUnavailable, TrainingError
from trainer.sync.base import NewWeights
from trainer.sync.engine_client import EngineClient

log = logging.getLogger(__name__)

Sums = list[dict[str, str]]


class WeightVerifier:
    """Compares checksums, and remembers the engine processes that passed."""

    def __init__(self) -> None:
        self._proven: set[tuple[str, str]] = set()

    def forget(self, engine: EngineClient) -> None:
        """Forget an engine that failed."""
        self._proven.discard(engine.identity)

    def needs_proof(self, engine: EngineClient) -> bool:
        """Return True if :meth:`expected` must run before weights are sent to the engine."""
        return not engine.info.embedded and engine.identity not in self._proven

    async def expected(self, engine: EngineClient, new: NewWeights) -> Sums | None:
        """Return the checksums that the weights must give; the engine's are random afterwards.

        None if the engine cannot read the folder: then they are unknown.
        """
        body = {"model_path": str(new.folder), "weight_version": new.loading, "flush_cache": False}
        try:
            await engine.post("/update_weights_from_disk", body)
        except TrainingError as error:
            log.warning(
                "the weights of the engine at %s cannot be verified: %s", engine.url, error.message
            )
            return None
        sums = await engine.checksums()
        if not sums:
            log.warning("the engine at %s reports no checksums of its weights", engine.url)
            return None
        await engine.post("/weights_checker", {"action": "reset_tensors"})
        if sums == await engine.checksums():
            raise TrainingError(
                f"the engine at {engine.url} reports the same checksums for random weights; set "
                "engine.weight_sync=disk"
            )
        return sums

    async def require(
        self, engine: EngineClient, sent: Mapping[str, str], expected: Sums | None, dtype: str
    ) -> Sums:
        """Return the engine's checksums, once they prove that it has the weights.

        ``sent`` are the checksums of the tensors sent, in ``dtype``. Raises EngineUnavailable or
        TrainingError if the engine has other weights.
        """
        sums = await engine.checksums()
        if engine.info.embedded:
            mine = sums[0] if sums else {}
            if engine.info.dtype == dtype and sent.keys() <= mine.keys():
                wrong = [name for name, value in sent.items() if mine[name] != value]
                if wrong:
                    raise EngineUnavailable(
                        f"the engine at {engine.url} has other values than were sent, in "
                        f"{len(wrong)} weights, e.g. {wrong[0]}"
                    )
        elif expected is not None:
            if sums != expected:
                raise TrainingError(
                    f"the engine at {engine.url} has other weights than those of the same "
                    "version's folder: it does not take this model's weights this way; set "
                    "engine.weight_sync=disk"
                )
            self._proven.add(engine.identity)
        return sums


def require_alike(engines: Sequence[EngineClient], sums: Sequence[Sums]) -> None:
    """Raise EngineUnavailable unless engines of one kind have the same weights."""
    first: dict[tuple[bool, bool, str, int], tuple[EngineClient, Sums]] = {}
    for engine, own in zip(engines, sums, strict=True):
        info = engine.info
        kind = (info.embedded, info.cuda, info.dtype, info.processes)
        other, others = first.setdefault(kind, (engine, own))
        if own != others:
            raise EngineUnavailable(
                f"the engines at {other.url} and {engine.url} were sent the same weights, but have "
                "different ones"
            )
