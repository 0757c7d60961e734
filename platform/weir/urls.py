"""Routes: wiring only."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("", include("inference.urls")),
    path("", include("tenants.urls")),
    path("admin/", admin.site.urls),
]
