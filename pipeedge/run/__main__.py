"""``python -m pipeedge.run``: as ``runtime.py``."""

from pipeedge.run.main import main

if __name__ == "__main__":
    main()
