"""A signal is a wish, a second SIGINT is an order, and everything is as before when the block ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from functional_sl.run.signals import Stop

BOTH = (signal.SIGINT, signal.SIGTERM)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in BOTH]


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_is_noted_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = handlers()
    with Stop() as stop:
        assert (stop.requested, stop.name) == (False, "")
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.name, stop.signal) == (True, number.name, number)
    assert handlers() == before


@pytest.mark.parametrize("first", BOTH)
def test_the_first_signal_names_the_stop(first: signal.Signals) -> None:
    with Stop() as stop:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == first


@pytest.mark.parametrize("first", BOTH)
def test_a_second_sigint_interrupts_at_once(first: signal.Signals) -> None:
    before = handlers()

    def twice() -> None:
        with Stop():
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert handlers() == before


def test_a_hang_up_that_is_ignored_as_under_nohup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_brings_the_handlers_back() -> None:
    before = handlers()

    def fail() -> None:
        with Stop():
            raise OSError

    with pytest.raises(OSError):
        fail()
    assert handlers() == before


def test_another_thread_takes_no_signals() -> None:
    before, seen = handlers(), []

    def body() -> None:
        with Stop() as stop:
            seen.extend([*handlers(), stop.requested])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [*before, False]
