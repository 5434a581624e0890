"""What holds for all tests."""

import signal

# A job started in a shell's background inherits an ignored SIGINT, and would pass it on to the
# commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
