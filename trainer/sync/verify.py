"""Whether an engine has what was sent to it; a status code is no proof.

The embedded engine tells checksums of the very tensors that a checkpoint has, so they must be
those of what was sent. SGLang's are of its own layout (fused, cut, perhaps quantised). There an
engine's first update is compared with what its own loader makes of the same version's folder, over
weights that were made random in between; later ones with the other engines.
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
    """What is known of each engine's process, by its URL and start."""

    def __init__(self) -> None:
        self._proven: set[tuple[str, str]] = set()

    def forget(self, engine: EngineClient) -> None:
        """It failed."""
        self._proven.discard(engine.identity)

    def needs_proof(self, engine: EngineClient) -> bool:
        """Whether :meth:`expected` has to be asked before weights are sent to it."""
        return not engine.about.embedded and engine.identity not in self._proven

    async def expected(self, engine: EngineClient, new: NewWeights) -> Sums | None:
        """What its checksums must be once it has these weights; they are random after this.

        None where it cannot read the folder: then it cannot be known.
        """
        body = {"model_path": str(new.folder), "weight_version": new.loading, "flush_cache": False}
        try:
            await engine.post("/update_weights_from_disk", body)
        except TrainingError as error:
            log.warning(
                "weights sent to it cannot be compared with its folder's: %s", error.message
            )
            return None
        sums = await engine.checksums()
        if not sums:
            log.warning("the engine at %s tells no checksums of its weights", engine.url)
            return None
        await engine.post("/weights_checker", {"action": "reset_tensors"})
        if sums == await engine.checksums():
            raise TrainingError(f"the engine at {engine.url} tells checksums that mean nothing")
        return sums

    async def require(
        self, engine: EngineClient, sent: Mapping[str, str], expected: Sums | None, dtype: str
    ) -> Sums:
        """Raises TrainingError where it has other weights; its checksums.

        ``sent`` are those of the tensors, in ``dtype``.
        """
        told = await engine.checksums()
        if engine.about.embedded:
            mine = told[0] if told else {}
            if engine.about.dtype == dtype and sent.keys() <= mine.keys():
                wrong = [name for name, value in sent.items() if mine[name] != value]
                if wrong:
                    raise EngineUnavailable(
                        f"the engine at {engine.url} has other values than were sent, in "
                        f"{len(wrong)} weights, e.g. {wrong[0]}"
                    )
        elif expected is not None:
            if told != expected:
                raise TrainingError(
                    f"the engine at {engine.url} has other weights than those of the same "
                    "version's folder: it does not take this model's weights this way; set "
                    "engine.weight_sync=disk"
                )
            self._proven.add(engine.identity)
        return told


def require_alike(engines: Sequence[EngineClient], sums: Sequence[Sums]) -> None:
    """EngineUnavailable unless engines of one kind have the same weights."""
    first: dict[tuple[bool, bool, str, int], tuple[EngineClient, Sums]] = {}
    for engine, told in zip(engines, sums, strict=True):
        about = engine.about
        kind = (about.embedded, about.cuda, about.dtype, about.processes)
        other, other_told = first.setdefault(kind, (engine, told))
        if told != other_told:
            raise EngineUnavailable(
                f"the engines at {other.url} and {engine.url} were sent the same weights, and have "
                "different ones"
            )
