"""How a node ends: at once, or after what is under way."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from any_agent.launcher import Node
from any_agent.launcher.shutdown import Terminated, terminate
from tests.support.launcher.children import until
from tests.support.launcher.stand_ins import Lab, checked_until

pytestmark = pytest.mark.service

DRAINED, AT_ONCE = 143, 130
"""How a stand-in ends at SIGTERM and at SIGINT."""


def all_started(lab: Lab, node: Node) -> None:
    checked_until(node, lambda: len(lab.events("starts")) == 6)


def codes(lab: Lab) -> dict[str, int]:
    return {event["part"]: event["code"] for event in lab.events("ends")}


def test_at_sigterm_the_router_and_the_trainer_are_told_first_and_engines_last(lab: Lab) -> None:
    with pytest.raises(Terminated) as left, lab.node() as node:
        all_started(lab, node)
        terminate(signal.SIGTERM, None)
    assert left.value.code == 0, "the program has ended well"
    ended = lab.names("ends")
    assert set(ended[:2]) == {"router", "trainer"}
    assert set(ended[2:4]) == {"rank-0", "rank-1"}
    assert set(ended[4:]) == {"engine"}
    assert {codes(lab)[name] for name in ended[:4]} == {DRAINED}


def test_an_interrupt_drains_nothing(lab: Lab) -> None:
    with pytest.raises(KeyboardInterrupt), lab.node() as node:
        all_started(lab, node)
        (node.dir.checkpoints / "latest").write_text("step-00000007\n")
        raise KeyboardInterrupt
    assert {codes(lab)[name] for name in ("router", "rank-0", "rank-1")} == {AT_ONCE}
    assert lab.said[-1] == "service   stopped; the same command goes on from step 7"


def test_what_does_not_end_is_awaited_for_so_long(lab: Lab) -> None:
    lab.keep_busy("rank-1")
    with pytest.raises(Terminated), lab.node("server.drain_timeout=2") as node:
        all_started(lab, node)
        began = time.monotonic()
        terminate(signal.SIGTERM, None)
    assert time.monotonic() - began >= 2
    assert lab.said[-1] == "service   stopped; unfinished work was cut off"
    assert lab.names("drains") == ["rank-1"]
    assert codes(lab)["rank-0"] == DRAINED
    assert codes(lab)["rank-1"] == AT_ONCE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(lab: Lab, number: signal.Signals) -> None:
    lab.keep_busy("router")

    def again() -> None:
        until(lambda: lab.names("drains"))
        os.kill(os.getpid(), number)

    other = threading.Thread(target=again)
    with pytest.raises(Terminated), lab.node("server.drain_timeout=100000") as node:
        all_started(lab, node)
        other.start()
        terminate(signal.SIGTERM, None)
    other.join()
    assert codes(lab)["router"] == AT_ONCE
