#!/usr/bin/env python3
"""One rank of a reverse auction: ``revauct.py RANK WORLD``. See docs/auction.md."""

from pipeedge.base.interrupt import start

if __name__ == "__main__":
    start("pipeedge.auction.main")
