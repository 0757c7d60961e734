"""The console's pages about people and keys."""

from allauth.account.views import login, logout
from django.urls import include, path

from tenants import views

urlpatterns = [
    path("login/", login, name="login"),
    path("logout/", logout, name="logout"),
    path("", include("allauth.urls")),
    path("t/<uuid:tenant_id>/keys/", views.keys, name="keys"),
    path("t/<uuid:tenant_id>/keys/<uuid:key_id>/revoke/", views.revoke_key, name="revoke_key"),
    path("t/<uuid:tenant_id>/keys/<uuid:key_id>/rotate/", views.rotate_key, name="rotate_key"),
]
