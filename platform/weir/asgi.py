"""ASGI entry point: HTTP to Django, websockets to Channels."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
application = get_asgi_application()
