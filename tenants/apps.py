from django.apps import AppConfig


class TenantsConfig(AppConfig):
    name = "tenants"
    verbose_name = "Tenancy"

    def ready(self) -> None:
        from tenants import sign_in_record, single_sign_on  # noqa: F401 - receivers connect by being imported
