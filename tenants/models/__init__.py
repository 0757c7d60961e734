from tenants.models.api_key import ApiKey, ApiKeyUse
from tenants.models.audit import ActorKind, AuditEntry
from tenants.models.auth_epoch import AuthEpoch
from tenants.models.data_copy import DataCopy, DataCopyFile, DataCopyState
from tenants.models.invitation import Invitation
from tenants.models.member import Membership, Role
from tenants.models.price import ModelPrice
from tenants.models.project import Project
from tenants.models.quota import QuotaLimit
from tenants.models.service_account import ServiceAccount
from tenants.models.sign_on import TenantSignOn
from tenants.models.tenant import Tenant
from tenants.models.tier import Tier
from tenants.models.user import User

__all__ = [
    "ActorKind",
    "ApiKey",
    "ApiKeyUse",
    "AuditEntry",
    "AuthEpoch",
    "DataCopy",
    "DataCopyFile",
    "DataCopyState",
    "Invitation",
    "Membership",
    "ModelPrice",
    "Project",
    "QuotaLimit",
    "Role",
    "ServiceAccount",
    "Tenant",
    "TenantSignOn",
    "Tier",
    "User",
]
