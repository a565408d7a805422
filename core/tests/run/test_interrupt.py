"""StopSwitch: which signals ask a run to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dovetail.errors import StopRequested
from dovetail.run.interrupt import StopSwitch


@pytest.fixture
def handler() -> Iterator[Callable[[int, Any], Any]]:
    """Sets a signal's handler for one test: these may run under nohup, or in the background of a shell."""
    before = {}

    def set_handler(number: int, wanted: Any) -> Any:
        before[number] = signal.signal(number, wanted)
        return wanted

    yield set_handler
    for number, former in before.items():
        signal.signal(number, former)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_for_a_stop_and_handlers_are_put_back(handler, number):
    before = handler(number, signal.SIG_DFL)
    with StopSwitch() as stop:
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested, match=signal.Signals(number).name) as caught:
            stop.check()
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not(handler, first):
    handler(signal.SIGINT, signal.SIG_DFL)
    handler(signal.SIGTERM, signal.SIG_DFL)
    with StopSwitch() as stop:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested, match=first.name):
            stop.check()
        with pytest.raises(KeyboardInterrupt, match="again"):
            os.kill(os.getpid(), signal.SIGINT)


def test_under_nohup_the_loss_of_the_terminal_stops_nothing(handler):
    handler(signal.SIGHUP, signal.SIG_IGN)
    with StopSwitch() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        stop.check()
