"""Sums by hour and by day without project and key beside them, for the reports that ask for neither."""

from typing import Any

import django.db.models.deletion
from django.db import migrations, models

import inference.models.histogram

_BY_KEY = "project_public_id, key_public_id, model, tier, finish_reason"
_TOTAL = "model, tier, finish_reason"
_HISTOGRAMS = """
           inference_histogram(inference_latency_bucket(first_token_at - created_at)),
           inference_histogram(inference_latency_bucket(finished_at - created_at))
               FILTER (WHERE finish_reason IN ('stop', 'length'))
"""
_SUMS = """
    INSERT INTO {table} AS kept (tenant_id, {time}, {by}, requests, prompt_tokens, cached_tokens,
                                completion_tokens, cost_microusd, adjustment_microusd, ttft, total)
    SELECT tenant_id, {value}, {by}, count(*), sum(prompt_tokens), sum(cached_tokens),
           sum(completion_tokens), sum(cost_microusd), 0, {histograms}
    FROM added GROUP BY tenant_id, {value}, {by} ORDER BY tenant_id, {value}, {by}
    ON CONFLICT (tenant_id, {time}, {by}) DO UPDATE SET
        requests = kept.requests + excluded.requests,
        prompt_tokens = kept.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = kept.cached_tokens + excluded.cached_tokens,
        completion_tokens = kept.completion_tokens + excluded.completion_tokens,
        cost_microusd = kept.cost_microusd + excluded.cost_microusd,
        ttft = inference_histogram_add(kept.ttft, excluded.ttft),
        total = inference_histogram_add(kept.total, excluded.total);
"""
_ADJUSTED = """
    INSERT INTO {table} AS kept (tenant_id, {time}, {by}, requests, prompt_tokens, cached_tokens,
                                completion_tokens, cost_microusd, adjustment_microusd, ttft, total)
    SELECT tenant_id, {value}, {adjusted_by}, '', 0, 0, 0, 0, 0, sum(cost_microusd), '{{}}', '{{}}'
    FROM added GROUP BY tenant_id, {value}, {adjusted_by} ORDER BY tenant_id, {value}, {adjusted_by}
    ON CONFLICT (tenant_id, {time}, {by}) DO UPDATE SET
        adjustment_microusd = kept.adjustment_microusd + excluded.adjustment_microusd;
"""
_HOUR = {"time": "starts_at", "value": "date_trunc('hour', created_at, 'UTC')"}
_DAY = {"time": "day", "value": "day"}
_ROLL_UPS = (
    {"table": "inference_usagehour", "by": _BY_KEY, **_HOUR},
    {"table": "inference_usageday", "by": _BY_KEY, **_DAY},
    {"table": "inference_usagehourtotal", "by": _TOTAL, **_HOUR},
    {"table": "inference_usagedaytotal", "by": _TOTAL, **_DAY},
)
_TRIGGERS = f"""
CREATE OR REPLACE FUNCTION inference_roll_up_usage() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO inference_recordedrequest (request_id, created_at) SELECT request_id, created_at FROM added;
    {"".join(_SUMS.format(histograms=_HISTOGRAMS, **at) for at in _ROLL_UPS)}
    RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION inference_roll_up_adjustment() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {"".join(_ADJUSTED.format(adjusted_by=at["by"].removesuffix(", finish_reason"), **at) for at in _ROLL_UPS)}
    RETURN NULL;
END $$;
"""
# From the sums by key: of months that the ledger has dropped they alone know.
_BACKFILL = """
INSERT INTO inference_usage{width}total (tenant_id, {time}, model, tier, finish_reason, requests, prompt_tokens,
    cached_tokens, completion_tokens, cost_microusd, adjustment_microusd, ttft, total)
SELECT tenant_id, {time}, model, tier, finish_reason, sum(requests), sum(prompt_tokens), sum(cached_tokens),
       sum(completion_tokens), sum(cost_microusd), sum(adjustment_microusd),
       inference_histogram_total(ttft), inference_histogram_total(total)
FROM inference_usage{width} GROUP BY tenant_id, {time}, model, tier, finish_reason;
"""
_STATEMENTS: tuple[str, ...] = (
    # Short, and unpacked for each sum otherwise, as in the sums by key.
    *(
        f"ALTER TABLE inference_usage{width}total ALTER COLUMN ttft SET STORAGE PLAIN,"
        " ALTER COLUMN total SET STORAGE PLAIN"
        for width in ("hour", "day")
    ),
    # Nobody adds between the filling and the new triggers.
    "LOCK TABLE inference_usagerecord, inference_usageadjustment IN SHARE MODE",
    "CREATE AGGREGATE inference_histogram_total(integer[]) (SFUNC = inference_histogram_add, STYPE = integer[],"
    " INITCOND = '{}')",
    _BACKFILL.format(width="hour", time="starts_at"),
    _BACKFILL.format(width="day", time="day"),
    "DROP AGGREGATE inference_histogram_total(integer[])",
    _TRIGGERS,
)


def _model(name: str, time: str, moment: "models.Field[Any, Any]") -> migrations.CreateModel:
    return migrations.CreateModel(
        name=name,
        fields=[
            ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
            ('model', models.CharField(max_length=200)),
            ('tier', models.CharField(max_length=32)),
            ('finish_reason', models.CharField(max_length=32)),
            ('requests', models.BigIntegerField(default=0)),
            ('prompt_tokens', models.BigIntegerField(default=0)),
            ('cached_tokens', models.BigIntegerField(default=0)),
            ('completion_tokens', models.BigIntegerField(default=0)),
            ('cost_microusd', models.BigIntegerField(default=0)),
            ('adjustment_microusd', models.BigIntegerField(default=0)),
            ('ttft', inference.models.histogram.HistogramField(default=dict)),
            ('total', inference.models.histogram.HistogramField(default=dict)),
            (time, moment),
            (
                'tenant',
                models.ForeignKey(
                    db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='tenants.tenant'
                ),
            ),
        ],
        options={'base_manager_name': 'unscoped', 'default_manager_name': 'unscoped'},
        managers=[('unscoped', django.db.models.manager.Manager())],
    )


def _once(name: str, time: str) -> migrations.AddConstraint:
    return migrations.AddConstraint(
        model_name=f'usage{name}total',
        constraint=models.UniqueConstraint(
            fields=('tenant', time, 'model', 'tier', 'finish_reason'), name=f'usage_{name}_total_once'
        ),
    )


class Migration(migrations.Migration):
    dependencies = [("inference", "0014_latencies_beside_sums")]
    operations = [
        _model('UsageHourTotal', 'starts_at', models.DateTimeField()),
        _model('UsageDayTotal', 'day', models.DateField()),
        _once('hour', 'starts_at'),
        _once('day', 'day'),
        # One way: the triggers of before would leave these behind.
        migrations.RunSQL(_STATEMENTS),
    ]
