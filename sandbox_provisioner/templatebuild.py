"""The module that servers of release 0.1 run to build a template. Remove this module in the next release."""

from __future__ import annotations

from .templates.build import main

if __name__ == "__main__":
    main()
