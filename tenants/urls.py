"""The console's pages about people."""

from allauth.account.views import login, logout
from django.urls import include, path

from tenants import member_views, service_account_views, tenant_views
from tenants.single_sign_on import single_sign_on

urlpatterns = [
    path("login/", login, name="login"),
    path("logout/", logout, name="logout"),
    path("sso/", single_sign_on, name="single_sign_on"),
    path("", include("allauth.urls")),
    path("invitations/<uuid:public_id>/<str:token>/", member_views.invitation, name="invitation"),
    path("t/<uuid:tenant_id>/data/", tenant_views.data, name="data_copies"),
    path("t/<uuid:tenant_id>/data/<uuid:copy_id>/", tenant_views.data_file, name="data_copy"),
    path("t/<uuid:tenant_id>/deletion/", tenant_views.deletion, name="deletion"),
    path(
        "t/<uuid:tenant_id>/service-accounts/",
        service_account_views.service_accounts,
        name="service_accounts",
    ),
    path(
        "t/<uuid:tenant_id>/service-accounts/<uuid:account_id>/key/",
        service_account_views.service_key,
        name="service_key",
    ),
    path(
        "t/<uuid:tenant_id>/service-accounts/<uuid:account_id>/retire/",
        service_account_views.retire,
        name="retire_service_account",
    ),
    path("t/<uuid:tenant_id>/members/", member_views.members, name="members"),
    path("t/<uuid:tenant_id>/members/<uuid:member_id>/role/", member_views.member_role, name="member_role"),
    path("t/<uuid:tenant_id>/members/<uuid:member_id>/remove/", member_views.remove, name="remove_member"),
    path(
        "t/<uuid:tenant_id>/invitations/<uuid:invitation_id>/again/",
        member_views.invitation_again,
        name="invitation_again",
    ),
    path(
        "t/<uuid:tenant_id>/invitations/<uuid:invitation_id>/revoke/",
        member_views.invitation_revoked,
        name="invitation_revoked",
    ),
]
