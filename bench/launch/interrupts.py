"""Interrupts: Ctrl-C and its relatives end the work in good order, and at once when asked twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# SIGHUP is what a closed terminal or a lost ssh connection sends.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# From the first Ctrl-C until what is not over then is ended the hard way.
CLEAN_END_S = 10.0


class InterruptedByOperatorError(Exception):
    """The work was ended by a signal, in good order.

    Attributes:
        exit_code: as shells give it, 128 and the signal's number.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"ended by {number.name}")
        self.exit_code = 128 + number


async def run_interruptible(
    work: Coroutine[Any, Any, T],
    *,
    kill_now: Callable[[], None],
    say: Callable[[str], None],
    clean_end_s: float = CLEAN_END_S,
) -> T:
    """Run the work; the first SIGINT, SIGTERM or SIGHUP cancels it, so that its ``finally`` clauses stop what it began.

    A second signal, or ``clean_end_s`` after the first, calls ``kill_now`` and leaves the process without further ado.
    The handlers are plain ones and act also while the event loop is busy with a long computation. A signal that is
    ignored (SIGHUP under nohup) stays ignored.

    Args:
        kill_now: ends all that may not outlive us, without asyncio (``server.kill_live_servers``).
        say: prints a line for the operator.

    Raises:
        InterruptedByOperatorError: a signal ended the work.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []
    timers: list[asyncio.TimerHandle] = []

    def leave_now() -> None:
        try:
            kill_now()
        finally:
            os._exit(128 + received[0])

    def end_cleanly() -> None:
        timers.append(loop.call_later(clean_end_s, leave_now))
        task.cancel()
        with contextlib.suppress(OSError):  # the terminal whose end SIGHUP tells takes no more lines
            say(f"{received[0].name}: ending in good order (at most {clean_end_s:.0f} s; once more ends it now)")

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if len(received) > 1:
            leave_now()
        loop.call_soon_threadsafe(end_cleanly)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heeded = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    for number in heeded:
        # The loop's own handler wakes it from its sleep, but waits until it is idle; the plain one does not wait.
        loop.add_signal_handler(number, lambda: None)
        signal.signal(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise InterruptedByOperatorError(received[0]) from None
        task.cancel()
        raise
    finally:
        for timer in timers:
            timer.cancel()
        for number in heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
