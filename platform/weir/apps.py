from django.apps import AppConfig, apps
from django.conf import settings
from django.db.models.signals import post_migrate


class WeirConfig(AppConfig):
    name = "weir"
    verbose_name = "Weir"

    def ready(self) -> None:
        from tenants import row_security
        from weir import celery, checks  # noqa: F401 - registers both

        # Django tells it per app with models; this one comes after tenants, below which it is.
        after = apps.get_app_config("inference")
        post_migrate.connect(row_security.after_migrate, dispatch_uid="weir.row_security", sender=after)
        if settings.ROW_SECURITY:
            row_security.install()
