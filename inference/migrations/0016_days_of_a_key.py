"""What one key used, and which keys were used lately: found without reading every key's days."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("inference", "0015_sums_in_total")]
    operations = [
        AddIndexConcurrently(
            model_name="usageday",
            index=models.Index(fields=["tenant", "key_public_id", "day"], name="usage_day_by_key"),
        ),
    ]
