"""The console's pages about inference. The API's routes are in inference/api."""

from django.urls import path

from inference import views

urlpatterns = [
    path("", views.home, name="home"),
    path("docs", views.docs, name="docs"),
]
