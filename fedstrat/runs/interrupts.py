"""Signals that ask to end, turned into one exception."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """A signal asked us to end; no Exception, so that nobody swallows it.

    Attributes:
        number: The signal's number.
        name: The signal's name.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within, the first Ctrl-C, SIGTERM or SIGHUP raises ``Interrupted``; the ones after it are ignored.

    So clean-up, whose steps all have time limits, comes to its end. Only the main thread can have signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
