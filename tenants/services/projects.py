"""Projects: labels inside a tenant that keys and reports are grouped by."""

from __future__ import annotations

from django.db import transaction

from tenants.models import Project, Tenant
from tenants.services.audit import Actor, record_audit


@transaction.atomic
def create_project(*, actor: Actor, tenant: Tenant, name: str) -> Project:
    """Raises django.core.exceptions.ValidationError when the name won't do or is taken."""
    project = Project(tenant=tenant, name=name.strip())
    project.full_clean()
    project.save()
    record_audit(
        actor=actor, action="project.created", tenant=tenant, target=project, after={"name": project.name}
    )
    return project
