"""Real PostgreSQL and Valkey for every run: the embedded ones unless DATABASE_URL and REDIS_URL name others."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

# A plugin and not a conftest: pytest-django reads the settings before any conftest is loaded.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "platform"))

from weir import embedded, places

_scratch = Path(tempfile.mkdtemp(prefix="weir-test-"))
_scratch.chmod(0o755)
for _directory in (_scratch, places.socket_dir(_scratch)):
    atexit.register(shutil.rmtree, _directory, ignore_errors=True)
# Set before Django reads its settings: the tests have a `var/`, and so secrets, of their own.
os.environ["WEIR_VAR_DIR"] = str(_scratch)


def _run(server: embedded.Server) -> str:
    process = embedded.start(server)
    atexit.register(process.wait)
    atexit.register(process.send_signal, server.command.stop_signal)
    return server.url


if "DATABASE_URL" not in os.environ:
    os.environ["DATABASE_URL"] = _run(embedded.prepare_postgres(_scratch, durable=False))
if "REDIS_URL" not in os.environ:
    os.environ["REDIS_URL"] = _run(embedded.prepare_valkey(_scratch, durable=False))
