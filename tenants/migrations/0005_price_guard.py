"""A price that has come into force stays as it is: ledger rows were charged by it."""

from django.db import migrations

GUARD = """
CREATE FUNCTION tenants_refuse_past_price() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.valid_from <= clock_timestamp() THEN
        RAISE EXCEPTION 'a price in force is never changed: % refused', TG_OP USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END $$;
CREATE TRIGGER tenants_modelprice_in_force BEFORE UPDATE OR DELETE ON tenants_modelprice
FOR EACH ROW EXECUTE FUNCTION tenants_refuse_past_price();
"""
DROP = """
DROP TRIGGER tenants_modelprice_in_force ON tenants_modelprice;
DROP FUNCTION tenants_refuse_past_price();
"""


class Migration(migrations.Migration):
    dependencies = [("tenants", "0004_prices")]
    operations = [migrations.RunSQL(GUARD, DROP)]
