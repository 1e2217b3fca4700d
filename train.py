#!/usr/bin/env python3
"""Train a model in a pipeline: ``python train.py --schedule 1f1b --stages 4 --workers 2``."""

import os
import signal

_INTERRUPTED = 130

if __name__ == "__main__":
    # While modules are imported there is nothing to clean up: the status is the one of any later moment.
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(_INTERRUPTED))

    from pipeedge.train.main import main

    main()
