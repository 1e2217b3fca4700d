"""``python -m pipeedge.reporting``."""

from pipeedge.reporting.main import main

if __name__ == "__main__":
    main()
