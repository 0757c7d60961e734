"""Sums by day of each key and model, without tier and finish reason beside them: who used most, of a thousand."""

import django.db.models.deletion
import django.db.models.manager
from django.db import migrations, models

_BY = "project_public_id, key_public_id, model"
_TRIGGERS = f"""
CREATE FUNCTION inference_roll_up_usage_of_keys() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO inference_usagedayofkey AS kept (tenant_id, day, {_BY}, requests, prompt_tokens, cached_tokens,
                                                 completion_tokens, cost_microusd, adjustment_microusd, failed)
    SELECT tenant_id, day, {_BY}, count(*), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),
           sum(cost_microusd), 0, count(*) FILTER (WHERE finish_reason IN ('error', 'deadline'))
    FROM added GROUP BY tenant_id, day, {_BY} ORDER BY tenant_id, day, {_BY}
    ON CONFLICT (tenant_id, day, {_BY}) DO UPDATE SET
        requests = kept.requests + excluded.requests,
        prompt_tokens = kept.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = kept.cached_tokens + excluded.cached_tokens,
        completion_tokens = kept.completion_tokens + excluded.completion_tokens,
        cost_microusd = kept.cost_microusd + excluded.cost_microusd,
        failed = kept.failed + excluded.failed;
    RETURN NULL;
END $$;
CREATE TRIGGER inference_usagerecord_roll_up_of_keys AFTER INSERT ON inference_usagerecord
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION inference_roll_up_usage_of_keys();
CREATE FUNCTION inference_roll_up_adjustment_of_keys() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO inference_usagedayofkey AS kept (tenant_id, day, {_BY}, requests, prompt_tokens, cached_tokens,
                                                 completion_tokens, cost_microusd, adjustment_microusd, failed)
    SELECT tenant_id, day, {_BY}, 0, 0, 0, 0, 0, sum(cost_microusd), 0
    FROM added GROUP BY tenant_id, day, {_BY} ORDER BY tenant_id, day, {_BY}
    ON CONFLICT (tenant_id, day, {_BY}) DO UPDATE SET
        adjustment_microusd = kept.adjustment_microusd + excluded.adjustment_microusd;
    RETURN NULL;
END $$;
CREATE TRIGGER inference_usageadjustment_roll_up_of_keys AFTER INSERT ON inference_usageadjustment
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION inference_roll_up_adjustment_of_keys();
"""
# From the sums by tier and end too: of months that the ledger has dropped they alone know.
_BACKFILL = f"""
INSERT INTO inference_usagedayofkey (tenant_id, day, {_BY}, requests, prompt_tokens, cached_tokens,
                                     completion_tokens, cost_microusd, adjustment_microusd, failed)
SELECT tenant_id, day, {_BY}, sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),
       sum(cost_microusd), sum(adjustment_microusd),
       coalesce(sum(requests) FILTER (WHERE finish_reason IN ('error', 'deadline')), 0)
FROM inference_usageday GROUP BY tenant_id, day, {_BY};
"""
_STATEMENTS = (
    # Nobody adds between the filling and the triggers.
    "LOCK TABLE inference_usagerecord, inference_usageadjustment IN SHARE MODE",
    _BACKFILL,
    _TRIGGERS,
)
_UNDONE = """
DROP TRIGGER inference_usagerecord_roll_up_of_keys ON inference_usagerecord;
DROP TRIGGER inference_usageadjustment_roll_up_of_keys ON inference_usageadjustment;
DROP FUNCTION inference_roll_up_usage_of_keys();
DROP FUNCTION inference_roll_up_adjustment_of_keys();
"""


class Migration(migrations.Migration):
    dependencies = [("inference", "0017_days_of_a_project"), ("tenants", "0014_waits_for_rate")]
    operations = [
        migrations.CreateModel(
            name="UsageDayOfKey",
            fields=[
                (
                    "id",
                    models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID"),
                ),
                ("requests", models.BigIntegerField(default=0)),
                ("prompt_tokens", models.BigIntegerField(default=0)),
                ("cached_tokens", models.BigIntegerField(default=0)),
                ("completion_tokens", models.BigIntegerField(default=0)),
                ("cost_microusd", models.BigIntegerField(default=0)),
                ("adjustment_microusd", models.BigIntegerField(default=0)),
                ("day", models.DateField()),
                ("project_public_id", models.UUIDField(null=True)),
                ("key_public_id", models.UUIDField(null=True)),
                ("model", models.CharField(max_length=200)),
                ("failed", models.BigIntegerField(default=0)),
                (
                    "tenant",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
            ],
            options={
                "base_manager_name": "unscoped",
                "default_manager_name": "unscoped",
                "indexes": [
                    models.Index(fields=["tenant", "key_public_id", "day"], name="usage_day_of_key_by_key"),
                    models.Index(
                        fields=["tenant", "project_public_id", "day"], name="usage_day_of_key_by_project"
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "day", "project_public_id", "key_public_id", "model"),
                        name="usage_day_of_key_once",
                        nulls_distinct=False,
                    )
                ],
            },
            managers=[("unscoped", django.db.models.manager.Manager())],
        ),
        migrations.RunSQL(_STATEMENTS, _UNDONE),
    ]
