"""Every change to tenants, members, keys and limits: verb first, the actor explicit, audited."""

from tenants.services.api_keys import (
    IssuedKey,
    RotationUnderway,
    change_api_key,
    issue_api_key,
    revoke_api_key,
    rotate_api_key,
)
from tenants.services.audit import Actor, record_audit
from tenants.services.demo import DEMO_SCOPES, Demo, ensure_demo
from tenants.services.key_limits import KeyLimit, key_limits, set_key_limits
from tenants.services.limits import remove_quota_limit, set_quota_limit
from tenants.services.prices import set_model_price
from tenants.services.projects import create_project, delete_project, rename_project
from tenants.services.tenants import add_member, change_tenant, create_tenant, resume_tenant, suspend_tenant

__all__ = [
    "DEMO_SCOPES",
    "Actor",
    "Demo",
    "IssuedKey",
    "KeyLimit",
    "RotationUnderway",
    "add_member",
    "change_api_key",
    "change_tenant",
    "create_project",
    "create_tenant",
    "delete_project",
    "ensure_demo",
    "issue_api_key",
    "key_limits",
    "record_audit",
    "remove_quota_limit",
    "rename_project",
    "resume_tenant",
    "revoke_api_key",
    "rotate_api_key",
    "set_key_limits",
    "set_model_price",
    "set_quota_limit",
    "suspend_tenant",
]
