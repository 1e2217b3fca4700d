#!/usr/bin/env python3
"""Train a model in a pipeline: ``python train.py --schedule 1f1b --stages 4 --workers 2``."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.train.main")
