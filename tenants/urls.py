"""The console's pages about people."""

from allauth.account.views import login, logout
from django.urls import include, path

urlpatterns = [
    path("login/", login, name="login"),
    path("logout/", logout, name="logout"),
    path("", include("allauth.urls")),
]
