#!/usr/bin/env python3
"""One rank of a reverse auction: ``revauct.py RANK WORLD``. See docs/auction.md."""

from pipeedge.auction.main import main

if __name__ == "__main__":
    main()
