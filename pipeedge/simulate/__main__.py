"""``python -m pipeedge.simulate``."""

from pipeedge.simulate.main import main

if __name__ == "__main__":
    main()
