from django.apps import AppConfig


class WeirConfig(AppConfig):
    name = "weir"
    verbose_name = "Weir"

    def ready(self) -> None:
        from weir import celery, checks  # noqa: F401 - registers both
