"""`python -m rlcore.cli` is `rlcore`."""

from __future__ import annotations

from rlcore.cli.main import main

if __name__ == "__main__":
    main()
