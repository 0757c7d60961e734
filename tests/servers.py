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

# The processes of a run share the cores, and OpenMP's threads spin before they sleep: with as many in each process as
# there are cores, torch's small products took seven times the processor time. Before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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


# Workers of pytest-xdist inherit this environment, but a Valkey is emptied by tests: each has servers of its own.
_EMBEDDED = "WEIR_TEST_SERVERS_FOR"
_of_parent = os.environ.get(_EMBEDDED, "").split()
for _variable, _prepare in (
    ("DATABASE_URL", embedded.prepare_postgres),
    ("REDIS_URL", embedded.prepare_valkey),
):
    if _variable in _of_parent or _variable not in os.environ:
        os.environ[_variable] = _run(_prepare(_scratch, durable=False))
        os.environ[_EMBEDDED] = " ".join({*_of_parent, *os.environ.get(_EMBEDDED, "").split(), _variable})
