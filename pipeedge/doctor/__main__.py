"""``python -m pipeedge.doctor``."""

from pipeedge.doctor.main import main

if __name__ == "__main__":
    main()
