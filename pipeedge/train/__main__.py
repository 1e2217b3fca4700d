"""``python -m pipeedge.train``: as ``train.py``."""

from pipeedge.train.main import main

main()
