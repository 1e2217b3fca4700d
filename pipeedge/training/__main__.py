"""``python -m pipeedge.training``: as ``train.py``."""

from pipeedge.training.main import main

main()
