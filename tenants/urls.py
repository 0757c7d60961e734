"""The console's pages about people and keys."""

from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path

from tenants import views
from tenants.forms import SignInForm

urlpatterns = [
    path(
        "login/",
        LoginView.as_view(
            template_name="tenants/login.html",
            authentication_form=SignInForm,
            redirect_authenticated_user=False,
        ),
        name="login",
    ),
    path("logout/", LogoutView.as_view(next_page="home"), name="logout"),
    path("t/<uuid:tenant_id>/keys/", views.keys, name="keys"),
    path("t/<uuid:tenant_id>/keys/<uuid:key_id>/revoke/", views.revoke_key, name="revoke_key"),
    path("t/<uuid:tenant_id>/keys/<uuid:key_id>/rotate/", views.rotate_key, name="rotate_key"),
]
