"""python -m draft_service."""

from __future__ import annotations

from draft_service.main import main

if __name__ == "__main__":
    raise SystemExit(main())
