"""Routes: wiring only."""

from django.contrib import admin
from django.urls import include, path

from inference.api.urls import no_such_route

urlpatterns = [
    path("v1/", include("inference.api.urls")),
    path("v1", no_such_route),  # an API client gets JSON, not a redirect
    path("", include("inference.urls")),
    path("", include("tenants.urls")),
    path("admin/", admin.site.urls),
]
