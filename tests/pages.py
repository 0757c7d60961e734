"""Every route of the product and what it is: a page and who sees it, or why it is none.

A route without a line here fails tests/inference/test_pages.py; a page is looked at by tests/e2e/test_pages.py and
timed by benchmarks/pages.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.test import RequestFactory
from django.urls import URLPattern, get_resolver, reverse

from tenants.models import User

NOBODY = "nobody"
"""Who is not signed in."""
OWNER = "owner"
RECENT = "owner, whose password was asked for again"
OPERATOR = "operator"

PAGES: dict[str, str] = {
    "home": NOBODY, "docs": NOBODY, "api_reference": NOBODY, "login": NOBODY, "single_sign_on": NOBODY,
    "account_reset_password": NOBODY, "account_reset_password_done": NOBODY,
    "account_reset_password_from_key_done": NOBODY, "account_signup": NOBODY, "account_inactive": NOBODY,
    "socialaccount_login_cancelled": NOBODY, "invitation": NOBODY,
    "overview": OWNER, "chat": OWNER, "keys": OWNER, "key": OWNER, "revoke_key": OWNER, "rotate_key": OWNER,
    "projects": OWNER, "project": OWNER, "limits": OWNER, "try_limit": OWNER,
    "usage": OWNER, "exports": OWNER, "statement": OWNER,
    "requests": OWNER, "request": OWNER, "batches": OWNER, "members": OWNER, "remove_member": OWNER,
    "service_accounts": OWNER, "data_copies": OWNER, "deletion": OWNER, "alerts": OWNER, "webhook": OWNER,
    "audit": OWNER, "settings": OWNER, "logout": OWNER,
    "account_reauthenticate": OWNER, "account_email": OWNER, "account_change_password": OWNER, "mfa_index": OWNER,
    "socialaccount_connections": OWNER, "usersessions_list": OWNER,
    "mfa_activate_totp": RECENT, "mfa_list_webauthn": RECENT, "mfa_add_webauthn": RECENT,
    "admin_live": OPERATOR, "admin_usage": OPERATOR, "admin_support": OPERATOR,
}  # fmt: skip
"""By the route's name, in the order of a visit."""

ELSEWHERE = {
    "setup": "test_first_run.py",
    "setup_operator": "test_first_run.py",
    "mfa_authenticate": "test_people.py: between password and console",
    "retire_service_account": "test_questions.py", "invitation_revoked": "test_questions.py",
    "cancel_batch": "test_questions.py", "admin_dead_letter": "test_questions.py",
    "admin_load_model": "test_questions.py", "admin_unload_model": "test_questions.py",
}  # fmt: skip
"""Pages that another browser test leads to."""

_POST = "answers POST alone"
_FILE = "a file"
_JSON = "JSON"
_STEP = "a step between two pages, which the tests of accounts take"
NO_PAGES: dict[str, str] = {
    "alive": "a word", "ready": _JSON, "metrics": "text", "live_state": _JSON,
    "operator_workers": _JSON, "operator_load": _JSON, "operator_unload": _JSON, "operator_command": _JSON,
    "setup_model": _POST, "setup_tenant": _POST, "setup_key": _POST, "service_key": _POST,
    "member_role": _POST, "invitation_again": _POST, "admin_end_support": _POST,
    "usage_csv": _FILE, "batch_file": _FILE, "export_file": _FILE, "statement_file": _FILE, "data_copy": _FILE,
    "export_json": _FILE, "export_markdown": _FILE, "mfa_download_recovery_codes": _FILE,
    "conversations": _JSON, "conversation": _JSON, "exchange": _JSON,
    "chat_home": "leads to a tenant's chat", "admin_start": "leads to the live page",
    "socialaccount_login_error": "an error, which answers 401",
    "account_login": "login by another name", "account_logout": "logout by another name",
    "account_set_password": "leads to the password's page", "account_confirm_login_code": "is off",
    "account_request_reauthentication_code": "is off", "account_confirm_reauthentication_code": "is off",
    "account_email_verification_sent": _STEP, "account_confirm_email": _STEP, "account_reset_password_from_key": _STEP,
    "mfa_reauthenticate": _STEP, "mfa_reauthenticate_webauthn": _STEP, "mfa_deactivate_totp": _STEP,
    "mfa_view_recovery_codes": _STEP, "mfa_generate_recovery_codes": _STEP, "mfa_remove_webauthn": _STEP,
    "mfa_edit_webauthn": _STEP, "socialaccount_signup": _STEP, "openid_connect_login": "leads to a provider",
    "openid_connect_callback": "comes from a provider",
}  # fmt: skip


def routes() -> dict[str, URLPattern]:
    """Of all but the API and the admin's own, by name."""
    return {str(route.name): route for route in _walk(get_resolver().url_patterns) if route.name}


def _walk(patterns: list[Any]) -> Iterator[URLPattern]:
    for pattern in patterns:
        if isinstance(pattern, URLPattern):
            yield pattern
        elif pattern.namespace != "admin" and str(pattern.pattern) != "v1/":
            yield from _walk(pattern.url_patterns)


def path_of(name: str, ids: dict[str, Any]) -> str:
    """`ids` by the names that routes give them; under a route's own name, a whole path."""
    if name in ids:
        return str(ids[name])
    wanted = routes()[name].pattern.converters
    return reverse(name, kwargs={key: ids[key] for key in wanted})


def admin_lists() -> list[str]:
    """Of every model in the operator's admin."""
    return [
        reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
        for model in admin.site._registry
    ]


def admin_forms(operator: User) -> list[str]:
    """Of every model in the operator's admin: to add a row, where that is done there, and the newest row's own."""
    request = RequestFactory().get("/admin/")
    request.user = operator
    found: list[str] = []
    for model, shown in admin.site._registry.items():
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}"
        if shown.has_add_permission(request):
            found.append(reverse(f"{name}_add"))
        newest = model._base_manager.order_by("-pk").first()
        if newest is not None:
            found.append(reverse(f"{name}_change", args=[newest.pk]))
    return found
