from tenants.models.user import User

__all__ = ["User"]
