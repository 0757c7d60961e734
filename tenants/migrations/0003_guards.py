"""What constraints alone can't say: the auth epoch, the append-only audit log, a key's limit within its tenant."""

from django.db import migrations

EPOCH = """
CREATE FUNCTION tenants_touch_auth_epoch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tenants_authepoch (id, value) VALUES (1, gen_random_uuid())
    ON CONFLICT (id) DO UPDATE SET value = EXCLUDED.value;
    RETURN NULL;
END $$;
"""

# Deferred to the commit, so that the one row they all write is the last lock that a transaction takes:
# two that change several rows each can't deadlock on it. A new key needs none (nobody has cached it).
_TRIGGER = """
CREATE CONSTRAINT TRIGGER {table}_auth_epoch AFTER {events} ON {table}
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION tenants_touch_auth_epoch();
"""
TRIGGERS = "".join(
    _TRIGGER.format(table=table, events=events)
    for table, events in [
        ("tenants_apikey", "UPDATE OR DELETE"),
        ("tenants_tenant", "UPDATE OR DELETE"),
        ("tenants_tier", "UPDATE OR DELETE"),
        ("tenants_quotalimit", "INSERT OR UPDATE OR DELETE"),
    ]
)
DROP_EPOCH = """
DROP TRIGGER tenants_apikey_auth_epoch ON tenants_apikey;
DROP TRIGGER tenants_tenant_auth_epoch ON tenants_tenant;
DROP TRIGGER tenants_tier_auth_epoch ON tenants_tier;
DROP TRIGGER tenants_quotalimit_auth_epoch ON tenants_quotalimit;
DROP FUNCTION tenants_touch_auth_epoch();
"""

# TRUNCATE stays possible: it needs the table's owner, and test databases are emptied by it.
APPEND_ONLY = """
CREATE FUNCTION tenants_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER tenants_auditentry_append_only BEFORE UPDATE OR DELETE ON tenants_auditentry
FOR EACH ROW EXECUTE FUNCTION tenants_refuse_change();
"""
DROP_APPEND_ONLY = """
DROP TRIGGER tenants_auditentry_append_only ON tenants_auditentry;
DROP FUNCTION tenants_refuse_change();
"""

# MATCH SIMPLE: checked only where both columns are set, that is for a key's limit.
KEY_WITHIN_TENANT = """
ALTER TABLE tenants_quotalimit ADD CONSTRAINT quota_limit_key_is_the_tenants
FOREIGN KEY (tenant_id, api_key_id) REFERENCES tenants_apikey (tenant_id, id) DEFERRABLE INITIALLY DEFERRED;
"""
DROP_KEY_WITHIN_TENANT = "ALTER TABLE tenants_quotalimit DROP CONSTRAINT quota_limit_key_is_the_tenants;"


class Migration(migrations.Migration):
    dependencies = [("tenants", "0002_default_tiers")]
    operations = [
        migrations.RunSQL(EPOCH + TRIGGERS, DROP_EPOCH),
        migrations.RunSQL(APPEND_ONLY, DROP_APPEND_ONLY),
        migrations.RunSQL(KEY_WITHIN_TENANT, DROP_KEY_WITHIN_TENANT),
    ]
