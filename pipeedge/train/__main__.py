"""``python -m pipeedge.train``: as ``train.py``."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.train.main")
