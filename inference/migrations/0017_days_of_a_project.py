"""What one project used: found without reading every project's days."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("inference", "0016_days_of_a_key")]
    operations = [
        AddIndexConcurrently(
            model_name="usageday",
            index=models.Index(fields=["tenant", "project_public_id", "day"], name="usage_day_by_project"),
        ),
    ]
