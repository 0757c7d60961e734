from django.apps import AppConfig


class TenantsConfig(AppConfig):
    name = "tenants"

    def ready(self) -> None:
        from tenants import sign_in_record  # noqa: F401 - its receivers connect when it is imported
