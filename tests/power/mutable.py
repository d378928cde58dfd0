"""What `mutable_store` is made with: mutants of it have a fate that is known."""

from __future__ import annotations

import time


def is_there(found: bool) -> bool:
    return found


def greeting() -> str:
    return "unseen"


def pause() -> None:
    time.sleep(0)


def never_called() -> int:
    return 1
