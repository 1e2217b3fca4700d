"""``python -m pipeedge.simulate``."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.simulate.main")
