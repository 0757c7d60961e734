"""The console's pages about inference. The API's routes are in inference/api."""

from django.urls import path

from inference import views
from inference.operator_api import live_state

urlpatterns = [
    path("", views.home, name="home"),
    path("docs", views.docs, name="docs"),
    path("chat", views.chat_home, name="chat_home"),
    path("operator/live", live_state, name="live_state"),
    path("t/<uuid:tenant_id>/", views.overview, name="overview"),
    path("t/<uuid:tenant_id>/limits/", views.limits, name="limits"),
    path("t/<uuid:tenant_id>/usage/", views.usage, name="usage"),
    path("t/<uuid:tenant_id>/chat/", views.chat, name="chat"),
]
