#!/usr/bin/env python3
"""Run one rank of a pipeline: ``python runtime.py RANK WORLD -pt ...`` on each device."""

import os
import signal

_INTERRUPTED = 130

if __name__ == "__main__":
    # While modules are imported there is nothing to clean up: the status is the one of any later moment.
    before = signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(_INTERRUPTED))

    from pipeedge.run.main import main

    signal.signal(signal.SIGINT, before)
    main()
