"""The ledger is append-only in the database itself. TRUNCATE stays possible: it needs the table's owner."""

from django.db import migrations

GUARD = """
CREATE FUNCTION inference_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER inference_usagerecord_append_only BEFORE UPDATE OR DELETE ON inference_usagerecord
FOR EACH ROW EXECUTE FUNCTION inference_refuse_change();
"""
DROP = """
DROP TRIGGER inference_usagerecord_append_only ON inference_usagerecord;
DROP FUNCTION inference_refuse_change();
"""


class Migration(migrations.Migration):
    dependencies = [("inference", "0001_initial")]
    operations = [migrations.RunSQL(GUARD, DROP)]
