"""``python -m pipeedge.doctor``."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.doctor.main")
