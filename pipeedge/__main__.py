"""Start the command ``pipeedge`` by ``python -m pipeedge``."""

from pipeedge.cli.main import main

if __name__ == "__main__":
    main()
