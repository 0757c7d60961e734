"""The three tiers that a new installation starts with. Operators change them in the admin."""

from typing import Any

from django.db import migrations

TIERS = [
    {"name": "realtime", "rank": 0, "weight": 4, "max_queued": 200, "max_queued_per_tenant": 50,
     "deadline_s": 120, "max_output_tokens": 4096},
    {"name": "standard", "rank": 1, "weight": 2, "max_queued": 1000, "max_queued_per_tenant": 200,
     "deadline_s": 300, "max_output_tokens": 4096},
    {"name": "batch", "rank": 2, "weight": 1, "max_queued": 10000, "max_queued_per_tenant": 2000,
     "deadline_s": 3600, "max_output_tokens": 8192},
]  # fmt: skip


def create_tiers(apps: Any, schema_editor: Any) -> None:
    tier = apps.get_model("tenants", "Tier")
    for values in TIERS:
        tier.objects.get_or_create(name=values["name"], defaults=values)


class Migration(migrations.Migration):
    dependencies = [("tenants", "0001_initial")]
    operations = [migrations.RunPython(create_tiers, migrations.RunPython.noop)]
