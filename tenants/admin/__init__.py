"""The operator's admin of tenants. Every change writes an audit row with the person who made it."""

from django.contrib import admin

from tenants.admin.api_keys import ApiKeyAdmin
from tenants.admin.audit import AuditEntryAdmin
from tenants.admin.limits import QuotaLimitAdmin
from tenants.admin.prices import ModelPriceAdmin
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
    "TierAdmin",
    "UserAdmin",
]

admin.site.site_header = admin.site.site_title = "Weir"
admin.site.index_title = "Operator"
