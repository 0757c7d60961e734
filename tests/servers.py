"""Real PostgreSQL and Valkey for every run: the embedded ones unless DATABASE_URL and REDIS_URL name others."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
from pathlib import Path

# A plugin and not a conftest: pytest-django reads the settings before any conftest is loaded.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "platform"))

from weir import embedded

_scratch = Path(tempfile.mkdtemp(prefix="weir-test-"))
_scratch.chmod(0o755)
if "DATABASE_URL" not in os.environ:
    _postgres, os.environ["DATABASE_URL"] = embedded.start_postgres(_scratch / "pg", _scratch / "pgsock")
    atexit.register(_postgres.wait)
    atexit.register(_postgres.send_signal, signal.SIGINT)
if "REDIS_URL" not in os.environ:
    _valkey, os.environ["REDIS_URL"] = embedded.start_valkey(_scratch / "valkey")
    atexit.register(_valkey.wait)
    atexit.register(_valkey.terminate)
