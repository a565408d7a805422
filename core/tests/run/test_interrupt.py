"""StopSwitch: which signals ask a run to stop."""

from __future__ import annotations

import os
import signal

import pytest

from dovetail.errors import StopRequested
from dovetail.run.interrupt import StopSwitch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_for_a_stop_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with StopSwitch() as stop:
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested, match=signal.Signals(number).name):
            stop.check()
    assert signal.getsignal(number) is before


def test_under_nohup_the_loss_of_the_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSwitch() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)
