#!/usr/bin/env python
"""Django's command line. Puts `platform/` on the path: it is a plain folder, not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "platform"))

from weir.cli import main

if __name__ == "__main__":
    main()
