"""Entry point of ``python -m pipeedge.report``."""

from pipeedge.report.main import main

if __name__ == "__main__":
    main()
