-- A database role for each kind of process, so that a gateway that was taken over can neither change the schema nor read
-- other tenants' rows. Once per database, by a superuser; then WEIR_ROW_SECURITY=true for gateways.
--
--   psql -v owner_password=... -v background_password=... -v gateway_password=... -f deploy/postgres/roles.sql DATABASE
--
--   weir_owner       migrations: owns the tables, and is not bound by their policies
--   weir_background  Celery: every tenant's rows; makes and drops the ledger's partitions, so a member of the owner
--   weir_gateway     gateways: rows only, and only those that the connection may see (platform/weir/row_security.py)
--
-- What exists already is handed to the owner first: REASSIGN OWNED BY the_role_until_now TO weir_owner;
\set ON_ERROR_STOP on
CREATE ROLE weir_owner LOGIN PASSWORD :'owner_password' NOSUPERUSER NOCREATEDB NOCREATEROLE NOBYPASSRLS;
CREATE ROLE weir_background LOGIN PASSWORD :'background_password' NOSUPERUSER NOCREATEDB NOCREATEROLE NOBYPASSRLS;
CREATE ROLE weir_gateway LOGIN PASSWORD :'gateway_password' NOSUPERUSER NOCREATEDB NOCREATEROLE NOBYPASSRLS;
GRANT weir_owner TO weir_background;
-- What Celery makes belongs to the owner as well.
ALTER ROLE weir_background SET role = weir_owner;
GRANT CREATE, USAGE ON SCHEMA public TO weir_owner;
GRANT USAGE ON SCHEMA public TO weir_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO weir_gateway;
GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO weir_gateway;
ALTER DEFAULT PRIVILEGES FOR ROLE weir_owner IN SCHEMA public
  GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO weir_gateway;
ALTER DEFAULT PRIVILEGES FOR ROLE weir_owner IN SCHEMA public GRANT USAGE, SELECT ON SEQUENCES TO weir_gateway;
