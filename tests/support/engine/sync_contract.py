"""Weights that our trainer sends, in any engine of SGLang's contract, by log-probabilities.

A test class that inherits :class:`SyncContract` provides the fixtures ``engines``, URLs of two that
hold the first of ``models`` as version 0, ``models``, folders of one shape; the weights' ``dtype``,
and how far an engine's numbers may be off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine.sglang_contract import IDS, body, call, events, newest
from tests.support.engine.sync import WAYS, Fleet, Weights, bring, syncing
from tests.support.engine.updates_contract import PREFIX, furthest
from tests.support.true_logprobs import TrueModel

SENT = [way for way in WAYS if way != "disk"]
_LONG = 1600
"""Tokens of a call that an update is to come in the middle of, also on a busy machine."""
ASK = body(max_new_tokens=20) | {"input_ids": PREFIX}


async def off(url: str, model: Path) -> float:
    """How far an engine's log-probabilities are from those of a forward pass, at most."""
    _, answer = await call(url, "/generate", ASK)
    return furthest(TrueModel(model), PREFIX, answer["meta_info"], slice(None), 1.0)


class SyncContract:
    dtype = "float32"
    rounding = 1e-3
    """Nats that a log-probability may be off."""

    @pytest.mark.parametrize("way", WAYS)
    async def test_new_weights_answer_at_once_under_their_version(
        self, way: str, engines: list[str], models: list[Path], tmp_path: Path
    ) -> None:
        """Twice, so that a group is used again; and behind a prompt that is cached."""
        fleet = Fleet(*engines)
        with syncing(way, dtype=self.dtype) as sync:
            for version, model in ((11, models[1]), (12, models[0])):
                assert await off(engines[0], model) > self.rounding
                new = Weights(model, tmp_path, self.dtype).version(version)
                await bring(sync, fleet, new)
                for url in engines:
                    assert await off(url, model) <= self.rounding
                    _, info = await call(url, "/model_info", method="GET")
                    assert info["weight_version"] == str(version)
        for proxy in fleet.proxies:
            assert proxy.events == ["pause", "v11", "resume", "pause", "v12", "resume"]

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.service
    async def test_calls_kept_over_an_update_go_on_with_the_new_weights(
        self, way: str, engines: list[str], models: list[Path], tmp_path: Path
    ) -> None:
        fleet = Fleet(engines[0])
        fleet.proxies[0].mode = "in_place"
        with syncing(way, dtype=self.dtype, in_place=True) as sync:
            entries: list[Any] = []
            sent = False
            async for event in events(engines[0], body(max_new_tokens=_LONG)):
                entries += newest(event, len(entries))
                if not sent:
                    sent = True
                    new = Weights(models[1], tmp_path, self.dtype).version(11)
                    await bring(sync, fleet, new)
        before, *_, after = event["meta_info"]["weight_versions"]
        assert (before["version"], before["start"]) == ("0", 0)
        assert (after["version"], after["end"]) == ("11", _LONG)
        whole = {"output_token_logprobs": entries}
        cut = slice(0, before["end"])
        assert furthest(TrueModel(models[0]), IDS, whole, cut, 1) <= self.rounding
        # With the old weights' cache the new ones say something between the two.
        rest = slice(after["start"], _LONG)
        assert furthest(TrueModel(models[0]), IDS, whole, rest, 1) > self.rounding

    @pytest.mark.parametrize("way", SENT)
    async def test_weights_damaged_on_the_way_are_noticed_and_sent_again(
        self, way: str, engines: list[str], models: list[Path], tmp_path: Path
    ) -> None:
        """A tensor that comes with other values is no new version; the next try mends it."""
        damaged: list[str] = []

        def damage(bucket: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
            if damaged:
                return bucket
            (name, tensor), *rest = bucket
            damaged.append(name)
            return [(name, tensor + 1), *rest]

        fleet = Fleet(*engines)
        with syncing(way, dtype=self.dtype, on_the_way=damage) as sync:
            await bring(sync, fleet, Weights(models[1], tmp_path, self.dtype).version(11))
        assert damaged
        for proxy in fleet.proxies:
            assert proxy.events.count("v11") == 1
            assert proxy.events.count("pause") == 2
            assert await off(proxy.engine_url, models[1]) <= self.rounding

    async def test_an_update_needs_one_open_session_at_a_time(self, engines: list[str]) -> None:
        """Weights come between a beginning and an end, which there is one of."""
        url = engines[0]
        update = {"names": [], "dtypes": [], "shapes": [], "group_name": "nobody"}
        assert (await call(url, "/update_weights_from_distributed", update))[0] == 400
        assert (await call(url, "/end_weight_update", {}))[0] == 400
        leave = {"group_name": "nobody"}
        assert (await call(url, "/destroy_weights_update_group", leave))[0] == 400
        assert (await call(url, "/begin_weight_update", {}))[0] == 200
        status, answer = await call(url, "/begin_weight_update", {})
        assert (status, answer["success"]) == (400, False)
        await call(url, "/end_weight_update", {})

    async def test_checksums_tell_weights_apart(
        self, engines: list[str], models: list[Path]
    ) -> None:
        async def sums(url: str) -> Any:
            status, answer = await call(url, "/weights_checker", {"action": "checksum"})
            assert status == 200
            return [told["checksums"] for told in answer["ranks"]]

        first, second = [await sums(url) for url in engines]
        assert first == second
        assert len(first) == 1 and len(first[0]) > 5
        update = {"model_path": str(models[1]), "weight_version": "1"}
        assert (await call(engines[1], "/update_weights_from_disk", update))[0] == 200
        assert await sums(engines[1]) != first
