"""What row-level security costs a read: as the tables' owner, and as weir_gateway with its tenant told.

    make bench-row-security

Starts the embedded PostgreSQL. A read takes a connection from the pool, asks one tenant's sums of a day and gives the
connection back, as a page does at its worst. Rounds take turns; medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 5


def bench(reads: int) -> dict[str, float]:
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection

    from inference.models import UsageDay
    from tenants import row_security
    from tenants.models import Tier
    from tenants.services import Actor, create_tenant
    from weir import embedded

    call_command("migrate", verbosity=0)
    tier = Tier.objects.get(name="standard")
    tenant = create_tenant(actor=Actor.system("bench"), name="Bench", tier=tier)
    database = connection.settings_dict
    psql = embedded.postgres_program("psql")
    roles = ROOT / "deploy" / "postgres" / "roles.sql"
    words = [f"-v{kind}_password=bench" for kind in ("owner", "background", "gateway")]
    subprocess.run(
        [
            str(psql),
            "-q",
            "-h",
            database["HOST"],
            "-U",
            database["USER"],
            *words,
            "-f",
            roles,
            database["NAME"],
        ],
        check=True,
        timeout=60,
    )
    owner = database["USER"]

    def one_round(user: str, bound: bool) -> float:
        """Microseconds a read."""
        connection.close_pool()  # type: ignore[attr-defined]  # PostgreSQL's own, not in the stubs
        database["USER"] = user
        if bound:
            row_security.install()
        with row_security.bound_to(str(tenant.pk)) if bound else nullcontext():
            began = 0.0
            for number in range(-100, reads):
                if number == 0:
                    began = time.perf_counter()
                list(UsageDay.objects.filter(tenant=tenant)[:1])
                connection.close()
            took = time.perf_counter() - began
        if bound:
            row_security.uninstall()
        return took / reads * 1e6

    rounds = [(one_round(owner, bound=False), one_round("weir_gateway", bound=True)) for _ in range(ROUNDS)]
    off, on = (statistics.median(values) for values in zip(*rounds, strict=True))
    added = statistics.median(on - off for off, on in rounds)
    connection.close_pool()  # type: ignore[attr-defined]  # as above
    return {"read_us": round(off, 1), "read_us_with_row_security": round(on, 1), "added_us": round(added, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reads", type=int, default=2000)
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
    from weir import embedded

    scratch = Path(tempfile.mkdtemp(prefix="weir-bench-"))
    scratch.chmod(0o755)
    os.environ["WEIR_VAR_DIR"] = str(scratch)
    server = embedded.prepare_postgres(scratch, durable=True)
    process, os.environ["DATABASE_URL"] = embedded.start(server), server.url
    try:
        results = bench(arguments.reads)
    finally:
        process.send_signal(server.command.stop_signal)
        process.wait(30)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
