"""What is set beside a chat, kept with its conversation: another device finds it there."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("inference", "0018_days_of_keys")]
    operations = [migrations.AddField("conversation", "settings", models.JSONField(null=True))]
