"""Entry point of ``python -m pipeedge.report``."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.report.main")
