"""The name under which servers of release 0.1 start the builder of templates. Remove it in the next release."""

from __future__ import annotations

from .templates.build import main

if __name__ == "__main__":
    main()
