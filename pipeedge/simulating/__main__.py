"""``python -m pipeedge.simulating``."""

from pipeedge.simulating.main import main

if __name__ == "__main__":
    main()
