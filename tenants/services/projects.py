"""Projects: labels inside a tenant that keys and reports are grouped by."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.db import transaction

from tenants.counting import counted
from tenants.models import Project, Tenant
from tenants.services.audit import Actor, record_audit
from tenants.services.names import clean_name


@transaction.atomic
def create_project(*, actor: Actor, tenant: Tenant, name: str) -> Project:
    """Raises django.core.exceptions.ValidationError when the name won't do or is taken."""
    _lock_names(tenant.pk)
    project = Project(tenant=tenant, name=clean_name(name))
    _refuse_twice(project)
    project.full_clean()
    project.save()
    record_audit(
        actor=actor, action="project.created", tenant=tenant, target=project, after={"name": project.name}
    )
    return project


@transaction.atomic
def rename_project(*, actor: Actor, project: Project, name: str) -> bool:
    """False when that is its name. Raises django.core.exceptions.ValidationError when it won't do or is taken."""
    _lock_names(project.tenant_id)
    locked = Project.objects.for_tenant(project.tenant_id).select_for_update().get(pk=project.pk)
    before, locked.name = locked.name, clean_name(name)
    if locked.name == before:
        return False
    _refuse_twice(locked)
    locked.full_clean()
    locked.save(update_fields=["name"])
    record_audit(
        actor=actor,
        action="project.renamed",
        tenant=locked.tenant,
        target=locked,
        before={"name": before},
        after={"name": locked.name},
    )
    return True


@transaction.atomic
def delete_project(*, actor: Actor, project: Project) -> None:
    """Raises django.core.exceptions.ValidationError while it has keys, also revoked ones: reports name it by them."""
    locked = Project.objects.for_tenant(project.tenant_id).select_for_update().get(pk=project.pk)
    if keys := locked.api_keys.count():
        raise ValidationError(
            f"“{locked.name}” has {counted(keys, 'key')}, and reports name it by them: "
            "move them to another project first."
        )
    record_audit(
        actor=actor,
        action="project.deleted",
        tenant=locked.tenant,
        target=locked,
        before={"name": locked.name},
    )
    locked.delete()


def _lock_names(tenant_id: int) -> None:
    """Of two who take one name at once, the second is told so, and not by the database."""
    Tenant.objects.select_for_update(no_key=True).get(pk=tenant_id)


def _refuse_twice(project: Project) -> None:
    others = Project.objects.for_tenant(project.tenant_id).exclude(pk=project.pk)
    if others.filter(name=project.name).exists():
        raise ValidationError({"name": "A project of this name already exists."})
