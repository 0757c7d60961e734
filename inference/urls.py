"""The console's pages about inference. The API's routes are in inference/api."""

from django.urls import path

from inference import (
    alert_views,
    batch_views,
    billing_views,
    chat_views,
    health,
    key_views,
    project_views,
    tenant_views,
    usage_views,
    views,
)
from inference.metrics import metrics
from inference.operator_api import live_state

urlpatterns = [
    path("", views.home, name="home"),
    path("healthz", health.alive, name="alive"),
    path("readyz", health.ready, name="ready"),
    path("metrics", metrics, name="metrics"),
    path("docs", views.docs, name="docs"),
    path("docs/api", views.api_reference, name="api_reference"),
    path("chat", chat_views.chat_home, name="chat_home"),
    path("operator/live", live_state, name="live_state"),
    path("t/<uuid:tenant_id>/", views.overview, name="overview"),
    path("t/<uuid:tenant_id>/alerts/", alert_views.alerts, name="alerts"),
    path("t/<uuid:tenant_id>/alerts/<uuid:webhook_id>/", alert_views.webhook, name="webhook"),
    path("t/<uuid:tenant_id>/audit/", tenant_views.audit, name="audit"),
    path("t/<uuid:tenant_id>/settings/", tenant_views.settings_page, name="settings"),
    path("t/<uuid:tenant_id>/limits/", views.limits, name="limits"),
    path("t/<uuid:tenant_id>/keys/", key_views.keys, name="keys"),
    path("t/<uuid:tenant_id>/keys/<uuid:key_id>/", key_views.key, name="key"),
    path("t/<uuid:tenant_id>/keys/<uuid:key_id>/revoke/", key_views.revoke_key, name="revoke_key"),
    path("t/<uuid:tenant_id>/keys/<uuid:key_id>/rotate/", key_views.rotate_key, name="rotate_key"),
    path("t/<uuid:tenant_id>/projects/", project_views.projects, name="projects"),
    path("t/<uuid:tenant_id>/projects/<uuid:project_id>/", project_views.project, name="project"),
    path("t/<uuid:tenant_id>/usage/", usage_views.usage, name="usage"),
    path("t/<uuid:tenant_id>/usage.csv", usage_views.usage_csv, name="usage_csv"),
    path("t/<uuid:tenant_id>/requests/", usage_views.request_log, name="requests"),
    path("t/<uuid:tenant_id>/requests/<str:request_id>/", usage_views.request_page, name="request"),
    path("t/<uuid:tenant_id>/batches/", batch_views.batch_list, name="batches"),
    path("t/<uuid:tenant_id>/batches/<str:batch_id>/cancel/", batch_views.cancel, name="cancel_batch"),
    path("t/<uuid:tenant_id>/batches/files/<str:file_id>", batch_views.batch_file, name="batch_file"),
    path("t/<uuid:tenant_id>/exports/", billing_views.exports, name="exports"),
    path("t/<uuid:tenant_id>/exports/<uuid:export_id>/", billing_views.export_file, name="export_file"),
    path("t/<uuid:tenant_id>/statement/", billing_views.statement, name="statement"),
    path("t/<uuid:tenant_id>/statement.pdf", billing_views.statement_file, name="statement_file"),
    path("t/<uuid:tenant_id>/chat/", chat_views.chat, name="chat"),
    path("t/<uuid:tenant_id>/chat/conversations/", chat_views.conversation_list, name="conversations"),
    path(
        "t/<uuid:tenant_id>/chat/conversations/<uuid:conversation_id>/",
        chat_views.conversation,
        name="conversation",
    ),
    path(
        "t/<uuid:tenant_id>/chat/conversations/<uuid:conversation_id>/exchanges/<uuid:exchange_id>/",
        chat_views.exchange,
        name="exchange",
    ),
    path(
        "t/<uuid:tenant_id>/chat/conversations/<uuid:conversation_id>/export.json",
        chat_views.export,
        {"form": "json"},
        name="export_json",
    ),
    path(
        "t/<uuid:tenant_id>/chat/conversations/<uuid:conversation_id>/export.md",
        chat_views.export,
        {"form": "md"},
        name="export_markdown",
    ),
]
