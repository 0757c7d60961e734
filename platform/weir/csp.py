"""The Content-Security-Policy: strict for our own pages, wider for the admin, whose theme needs it."""

from __future__ import annotations

from csp.constants import NONE, SELF, UNSAFE_EVAL, UNSAFE_INLINE
from csp.middleware import CSPMiddleware, PolicyParts
from django.http import HttpRequest, HttpResponseBase

STRICT = {
    "default-src": [NONE],
    "script-src": [SELF],
    "style-src": [SELF],
    "img-src": [SELF],
    "font-src": [SELF],
    "connect-src": [SELF],
    "form-action": [SELF],
    "base-uri": [NONE],
    "frame-ancestors": [NONE],
}

_ADMIN = {
    "script-src": [SELF, UNSAFE_EVAL],  # Alpine.js evaluates attributes
    "style-src": [SELF, UNSAFE_INLINE],
    "img-src": [SELF, "data:"],
}


class ContentSecurityPolicyMiddleware(CSPMiddleware):
    def get_policy_parts(
        self, request: HttpRequest, response: HttpResponseBase, report_only: bool = False
    ) -> PolicyParts:
        parts = super().get_policy_parts(request, response, report_only)
        if request.path_info.startswith("/admin/"):
            parts.replace = {**_ADMIN, **(parts.replace or {})}
        return parts
