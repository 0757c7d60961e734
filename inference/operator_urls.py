"""The operator's routes for programs, under /operator. They are in the OpenAPI document."""

from django.urls import path

from inference import operator_fleet_api
from inference.operator_api import live_state

urlpatterns = [
    path("live", live_state, name="live_state"),
    path("workers", operator_fleet_api.workers, name="operator_workers"),
    path("workers/<str:worker_id>/models", operator_fleet_api.load_model, name="operator_load"),
    path(
        "workers/<str:worker_id>/models/<path:model>",
        operator_fleet_api.unload_model,
        name="operator_unload",
    ),
    path("commands/<str:command_id>", operator_fleet_api.command, name="operator_command"),
]
