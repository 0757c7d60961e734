"""Routes: wiring only."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("v1/", include("inference.api.urls")),
    path("", include("inference.urls")),
    path("", include("tenants.urls")),
    path("admin/", admin.site.urls),
]
