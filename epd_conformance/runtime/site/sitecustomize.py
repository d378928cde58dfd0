"""Runs at the start of every Python process of a server: our hooks first, then the user's own sitecustomize.

Python imports only the first `sitecustomize` on sys.path. This one is that first one, so it must stand aside
for whatever other would have been found. It runs in every process, also in short-lived ones: it imports
nothing that costs time.
"""

import os
import sys


def _run_the_next_sitecustomize() -> None:
    """Import the sitecustomize further down sys.path, as Python itself would have done without this one.

    Its errors are not caught: Python reports them in the same words as it would have without us. Our
    directory is off sys.path meanwhile, so that one which chains in its turn does not find us again.
    """
    here = __file__.rpartition(os.sep)[0]
    ours = sys.modules.pop(__name__, None)
    position = sys.path.index(here)
    sys.path.remove(here)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            # There is no other, and Python's import machinery expects to find the module it has loaded.
            sys.modules[__name__] = ours
    finally:
        sys.path.insert(position, here)


# Imported under another name (by a tool that walks the package) there is nothing to do.
if __name__ == "sitecustomize":
    try:
        # Both are found because this directory is on sys.path.
        import _epd_torchvision  # type: ignore[import-not-found]

        _epd_torchvision.install()
        if "EPD_LIFELINE" in os.environ:
            import _epd_lifeline  # type: ignore[import-not-found]

            _epd_lifeline.watch()
    finally:
        _run_the_next_sitecustomize()
