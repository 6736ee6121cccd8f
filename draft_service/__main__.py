"""python -m draft_service."""

from __future__ import annotations

from outrider import import_for_good

if __name__ == "__main__":
    raise SystemExit(import_for_good("draft_service.main").main())
