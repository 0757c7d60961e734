"""Routes: wiring only."""

from allauth.account.decorators import secure_admin_login
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from inference.api.urls import no_such_route
from inference.operator_fleet import load_form, unload
from inference.operator_tenants import tenants_page
from inference.operator_views import dead_letter, live_page
from inference.support_views import end_support, support

urlpatterns = [
    path("v1/", include("inference.api.urls")),
    path("v1", no_such_route),  # an API client gets JSON, not a redirect
    path("", include("inference.urls")),
    path("", include("tenants.urls")),
    path(
        "admin/", admin.site.admin_view(RedirectView.as_view(pattern_name="admin_live")), name="admin_start"
    ),
    path("admin/live/", admin.site.admin_view(live_page), name="admin_live"),
    path("admin/live/dead-letter/", admin.site.admin_view(dead_letter), name="admin_dead_letter"),
    path("admin/live/load/", admin.site.admin_view(load_form), name="admin_load_model"),
    path("admin/live/unload/", admin.site.admin_view(unload), name="admin_unload_model"),
    path("admin/login/", secure_admin_login(admin.site.login)),  # one way in, with second factor and lock-out
    path("admin/usage/", admin.site.admin_view(tenants_page), name="admin_usage"),
    path("admin/support/<uuid:tenant_id>/", admin.site.admin_view(support), name="admin_support"),
    path("admin/support/<uuid:tenant_id>/end/", admin.site.admin_view(end_support), name="admin_end_support"),
    path("admin/", admin.site.urls),
]
handler400 = "inference.outside_views.bad_request"
handler404 = "inference.outside_views.not_found"
handler500 = "inference.outside_views.server_error"
