"""The first signal ends training as it should be ended, the next one at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from any_agent.errors import StartupError
from tests.support.errors import fails_with
from trainer.signals import StopRequested, StopSignals

SAID: list[str] = []


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    SAID.clear()
    signals = StopSignals(SAID.append)
    with signals.handled():
        yield signals


@pytest.mark.parametrize(
    ("number", "code", "gently"), [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)]
)
def test_the_first_signal_ends_training_and_the_second_at_once(
    signals: StopSignals, number: signal.Signals, code: int, gently: bool
) -> None:
    stopped: list[bool] = []
    signals.stop = lambda: stopped.append(True)
    signal.raise_signal(number)
    assert (stopped, signals.received) == ([True], number)
    (line,) = SAID
    assert "checkpoint" in line and "again" in line
    with pytest.raises(StopRequested) as ended:
        signal.raise_signal(number)
    assert (ended.value.code, ended.value.gently) == (code, gently)
    assert stopped == [True]


def test_a_signal_before_training_or_after_a_part_has_died_ends_at_once(
    signals: StopSignals,
) -> None:
    with pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGINT)
    signals.failure = lambda: StartupError("engine 0 ended 6 times")
    with fails_with(StartupError, "engine 0"):
        signal.raise_signal(signal.SIGINT)
    assert SAID == []


def test_signal_handlers_are_given_back_and_not_installed_in_another_thread() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    signals = StopSignals(SAID.append)

    def installed() -> bool:
        with signals.handled():
            return signals.installed

    with ThreadPoolExecutor(1) as threads:
        assert not threads.submit(installed).result()
    with signals.handled():
        assert signals.installed
        signals.ignore()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert not signals.installed
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
