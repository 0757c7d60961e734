"""Histograms of latencies as columns of the sums by hour and by day, instead of a table with a row for each bucket."""

from django.db import migrations

import inference.models.histogram

# The step is models/histogram.py's LATENCY_STEP.
FUNCTIONS = """
CREATE FUNCTION inference_latency_bucket(latency interval) RETURNS integer LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN greatest(0, ceil(ln(greatest(extract(epoch FROM latency)::float8 * 1000, 1)) / ln(1.1::float8)))::integer;
CREATE FUNCTION inference_histogram_count(counts integer[], bucket integer) RETURNS integer[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
    counts[bucket] := coalesce(counts[bucket], 0) + 1;
    RETURN counts;
END $$;
CREATE AGGREGATE inference_histogram(integer) (
    SFUNC = inference_histogram_count, STYPE = integer[], INITCOND = '{}', PARALLEL = SAFE);
CREATE FUNCTION inference_histogram_add(counts integer[], added integer[]) RETURNS integer[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
    IF counts = '{}' THEN RETURN added; END IF;
    FOR bucket IN coalesce(array_lower(added, 1), 0) .. coalesce(array_upper(added, 1), -1) LOOP
        IF added[bucket] IS NOT NULL THEN
            counts[bucket] := coalesce(counts[bucket], 0) + added[bucket];
        END IF;
    END LOOP;
    RETURN counts;
END $$;
"""

# Plain: they are short, and each of some fifty sums would unpack them again.
_COLUMNS = """
ALTER TABLE {table} ADD COLUMN ttft integer[] NOT NULL DEFAULT '{{}}', ADD COLUMN total integer[] NOT NULL DEFAULT '{{}}',
    ALTER COLUMN ttft SET STORAGE PLAIN, ALTER COLUMN total SET STORAGE PLAIN;
"""
_KEY = "project_public_id, key_public_id, model, tier, finish_reason"
_HISTOGRAMS = """
           inference_histogram(inference_latency_bucket(first_token_at - created_at)),
           inference_histogram(inference_latency_bucket(finished_at - created_at))
               FILTER (WHERE finish_reason IN ('stop', 'length'))
"""
_SUMS = """
    INSERT INTO {table} AS kept (tenant_id, {time}, {key}, requests, prompt_tokens, cached_tokens,
                                completion_tokens, cost_microusd, adjustment_microusd, ttft, total)
    SELECT tenant_id, {value}, {key}, count(*), sum(prompt_tokens), sum(cached_tokens),
           sum(completion_tokens), sum(cost_microusd), 0, {histograms}
    FROM added GROUP BY 1, 2, 3, 4, 5, 6, 7 ORDER BY 1, 2, 3, 4, 5, 6, 7
    ON CONFLICT (tenant_id, {time}, {key}) DO UPDATE SET
        requests = kept.requests + excluded.requests,
        prompt_tokens = kept.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = kept.cached_tokens + excluded.cached_tokens,
        completion_tokens = kept.completion_tokens + excluded.completion_tokens,
        cost_microusd = kept.cost_microusd + excluded.cost_microusd,
        ttft = inference_histogram_add(kept.ttft, excluded.ttft),
        total = inference_histogram_add(kept.total, excluded.total);
"""
# Every row of the ledger has its sums already: this meets them all.
_BACKFILL = """
INSERT INTO {table} (tenant_id, {time}, {key}, requests, prompt_tokens, cached_tokens, completion_tokens, cost_microusd,
                     adjustment_microusd, ttft, total)
SELECT tenant_id, {value}, {key}, 0, 0, 0, 0, 0, 0, {histograms}
FROM inference_usagerecord GROUP BY 1, 2, 3, 4, 5, 6, 7
ON CONFLICT (tenant_id, {time}, {key}) DO UPDATE SET ttft = excluded.ttft, total = excluded.total;
"""
# Of months that the ledger has dropped the old table alone knows; it knew no finish reason: the busiest gets all.
_DROPPED = """
UPDATE inference_usageday AS kept SET ttft = told.ttft, total = told.total
FROM (
    SELECT tenant_id, day, project_public_id, key_public_id, model, tier,
           inference_histogram(bucket) FILTER (WHERE metric = 'ttft') AS ttft,
           inference_histogram(bucket) FILTER (WHERE metric = 'total') AS total
    FROM inference_latencyday AS old, generate_series(1, old.requests)
    WHERE NOT EXISTS (SELECT FROM inference_usagerecord AS row WHERE row.tenant_id = old.tenant_id AND row.day = old.day)
    GROUP BY 1, 2, 3, 4, 5, 6
) AS told
WHERE kept.id = (
    SELECT id FROM inference_usageday AS busiest
    WHERE busiest.tenant_id = told.tenant_id AND busiest.day = told.day AND busiest.model = told.model
        AND busiest.tier = told.tier AND busiest.project_public_id IS NOT DISTINCT FROM told.project_public_id
        AND busiest.key_public_id IS NOT DISTINCT FROM told.key_public_id
    ORDER BY (finish_reason = 'stop') DESC, requests DESC LIMIT 1);
"""
_HOUR = {"table": "inference_usagehour", "time": "starts_at", "value": "date_trunc('hour', created_at, 'UTC')"}
_DAY = {"table": "inference_usageday", "time": "day", "value": "day"}
ROLL_UPS = (
    """
CREATE OR REPLACE FUNCTION inference_roll_up_usage() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO inference_recordedrequest (request_id, created_at) SELECT request_id, created_at FROM added;
"""
    + _SUMS.format(key=_KEY, histograms=_HISTOGRAMS, **_HOUR)
    + _SUMS.format(key=_KEY, histograms=_HISTOGRAMS, **_DAY)
    + """
    RETURN NULL;
END $$;
"""
)


class Migration(migrations.Migration):
    dependencies = [("inference", "0013_what_the_operator_decides")]
    operations = [
        # One way: buckets of another table can't be told from these, which know the finish reason too.
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(
                    [
                        FUNCTIONS,
                        # Nobody adds between the filling and the new trigger.
                        "LOCK TABLE inference_usagerecord IN SHARE MODE",
                        *(_COLUMNS.format(**at) for at in (_HOUR, _DAY)),
                        *(_BACKFILL.format(key=_KEY, histograms=_HISTOGRAMS, **at) for at in (_HOUR, _DAY)),
                        _DROPPED,
                        ROLL_UPS,
                        "DROP TABLE inference_latencyday",
                    ]
                )
            ],
            state_operations=[
                migrations.AddField(model, name, inference.models.histogram.HistogramField(default=dict))
                for model in ("usagehour", "usageday")
                for name in ("ttft", "total")
            ]
            + [migrations.DeleteModel("LatencyDay")],
        ),
    ]
