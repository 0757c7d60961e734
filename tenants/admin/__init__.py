"""The operator's admin of tenants. Every change writes an audit row with the person who made it."""

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from allauth.usersessions.models import UserSession
from django.contrib import admin

from tenants.admin.api_keys import ApiKeyAdmin
from tenants.admin.audit import AuditEntryAdmin
from tenants.admin.limits import QuotaLimitAdmin
from tenants.admin.prices import ModelPriceAdmin
from tenants.admin.sign_on import TenantSignOnAdmin
from tenants.admin.tenants import MembershipAdmin, ProjectAdmin, TenantAdmin, TierAdmin
from tenants.admin.users import GroupAdmin, UserAdmin

__all__ = [
    "ApiKeyAdmin",
    "AuditEntryAdmin",
    "GroupAdmin",
    "MembershipAdmin",
    "ModelPriceAdmin",
    "ProjectAdmin",
    "QuotaLimitAdmin",
    "TenantAdmin",
    "TenantSignOnAdmin",
    "TierAdmin",
    "UserAdmin",
]

# What django-allauth keeps is changed by people themselves, or by services that are audited.
admin.site.unregister([EmailAddress, Authenticator, SocialAccount, SocialApp, SocialToken, UserSession])
admin.site.site_header = admin.site.site_title = "Weir"
admin.site.index_title = "Operator"
