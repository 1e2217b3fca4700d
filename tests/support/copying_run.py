"""``runtime.py`` on a standby, which says of each page that it was copied."""

from __future__ import annotations

import sys

from pipeedge.decoding.page_copies import CopiesOfPages
from pipeedge.run.main import main

_stored = CopiesOfPages.stored


def _told(self: CopiesOfPages, page: int, step: int) -> None:
    _stored(self, page, step)
    print(f"page {page} is copied", file=sys.stderr, flush=True)


CopiesOfPages.stored = _told  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
