"""How the modules of a service are imported."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any


def import_for_good(name: str) -> Any:
    """Import a module whose process needs it to its end; returns it.

    What it imports stays: no collection walks it, neither while it is made nor later. With torch that is some 0.4 s of
    CPU time a start, in a gateway 0.1 s.
    """
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()
