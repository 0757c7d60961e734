"""Routes under /v1."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import path, re_path

from inference.api import (
    audit,
    batches,
    exports,
    files,
    keys,
    organization,
    organization_usage,
    usage,
    webhooks,
)
from inference.api.chat_completions import chat_completions
from inference.api.completions import completions
from inference.api.embeddings import embeddings
from inference.api.endpoint import by_method
from inference.api.messages import count_tokens, messages
from inference.api.models import list_models, retrieve_model
from inference.api.openapi import ApiDocument
from inference.api.quota import quota, try_out
from inference.api.requests import cancel_request, explain_request, resume_stream, retrieve_request
from inference.api.responses import cancel_response, count_input_tokens, list_input_items, response, responses
from inference.api.tokenise import detokenize, tokenize
from inference.operator_urls import urlpatterns as operator_routes
from inference.outside_views import no_such_url


async def no_such_route(request: HttpRequest) -> HttpResponse:
    return no_such_url(request)


no_such_route.csrf_exempt = True  # type: ignore[attr-defined]  # Django's own way to say so

_routes = [
    path("chat/completions", chat_completions, name="chat-completions"),
    path("completions", completions, name="completions"),
    path("messages", messages, name="messages"),
    path("messages/count_tokens", count_tokens, name="count-tokens"),
    path("embeddings", embeddings, name="embeddings"),
    path("responses", responses, name="responses"),
    path("responses/input_tokens", count_input_tokens, name="response-input-tokens"),
    path("responses/<str:response_id>", response, name="response"),
    path("responses/<str:response_id>/cancel", cancel_response, name="cancel-response"),
    path("responses/<str:response_id>/input_items", list_input_items, name="response-input-items"),
    path("files", files.files, name="files"),
    path("files/<str:file_id>", files.file, name="file"),
    path("files/<str:file_id>/content", files.file_content, name="file-content"),
    path("batches", batches.batches, name="batches"),
    path("batches/<str:batch_id>", batches.batch, name="batch"),
    path("batches/<str:batch_id>/cancel", batches.cancel_batch, name="cancel-batch"),
    path("quota", quota, name="quota"),
    path("quota/try", try_out, name="try-quota"),
    path("tokenize", tokenize, name="tokenize"),
    path("detokenize", detokenize, name="detokenize"),
    path("requests/<str:request_id>", retrieve_request, name="request"),
    path("requests/<str:request_id>/cancel", cancel_request, name="cancel-request"),
    path("requests/<str:request_id>/explain", explain_request, name="explain-request"),
    path("requests/<str:request_id>/stream", resume_stream, name="request-stream"),
    path("models", list_models, name="models"),
    path("models/<path:model_id>", retrieve_model, name="model"),
    path("usage", usage.usage, name="usage-lines"),
    path("usage/costs", usage.costs, name="usage-costs"),
    path("usage/statement", usage.statement, name="usage-statement"),
    path("usage/exports", exports.exports, name="usage-exports"),
    path("usage/exports/<str:export_id>", exports.retrieve, name="usage-export"),
    path("usage/exports/<str:export_id>/content", exports.content, name="usage-export-content"),
    path("audit", audit.audit, name="audit"),
    path("audit/export", audit.export, name="audit-export"),
    path("alerts", webhooks.alerts, name="alerts"),
    path("webhooks", webhooks.webhooks, name="webhooks"),
    path("webhooks/<str:webhook_id>", webhooks.webhook, name="webhook"),
    path("webhooks/<str:webhook_id>/rotate", webhooks.rotate_secret, name="rotate-webhook-secret"),
    path("webhooks/<str:webhook_id>/test", webhooks.test, name="test-webhook"),
    path("webhooks/<str:webhook_id>/deliveries", webhooks.deliveries, name="webhook-deliveries"),
    path("keys", keys.keys, name="api-keys"),
    path("keys/<str:key_id>/rotate", keys.rotate, name="rotate-api-key"),
    path("keys/<str:key_id>/limits", organization.limits_of_key, name="limits-of-api-key"),
    path("organization", organization.organization, name="organization"),
    path("organization/projects", organization.projects, name="organization-projects"),
    path("organization/projects/<str:project_id>", organization.project, name="organization-project"),
    path("organization/members", organization.members, name="organization-members"),
    path("organization/limits", organization.limits, name="organization-limits"),
    path("organization/usage/completions", organization_usage.completions, name="organization-completions"),
    path("organization/usage/embeddings", organization_usage.embeddings, name="organization-embeddings"),
    path("organization/costs", organization_usage.costs, name="organization-costs"),
    path("keys/<str:key_id>/revoke", keys.revoke, name="revoke-api-key"),
]
api_document = ApiDocument({"/v1/": _routes, "/operator/": operator_routes})
urlpatterns = [
    *_routes,
    path("openapi.json", by_method(GET=api_document.serve), name="openapi"),
    re_path(r"", no_such_route),
]
