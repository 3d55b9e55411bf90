"""What holds for all tests."""

import signal

# A shell starts its background jobs with these ignored, and every process that a test starts would inherit that: the
# tests of Ctrl-C would then wait for ever, although nothing is wrong.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
