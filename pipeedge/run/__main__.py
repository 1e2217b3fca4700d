"""``python -m pipeedge.run``: as ``runtime.py``."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.run.main")
