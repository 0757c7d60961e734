"""`/v1/organization`: the tenant, its projects, members and limits; and what a key is limited to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from asgiref.sync import sync_to_async
from django.core.exceptions import ValidationError
from django.http import HttpResponse

from inference.api.actors import key_actor
from inference.api.endpoint import ApiCall, by_method, endpoint
from inference.api.error_shapes import invalid_request
from inference.api.keys import no_such_key
from inference.errors import NotAllowed, NotFound
from inference.schemas import organization as out
from tenants.models import Project, Tenant
from tenants.principal import Scope
from tenants.selectors import (
    ApiKeyNotFound,
    ProjectNotFound,
    get_api_key,
    get_project,
    list_limits,
    list_members,
    list_projects,
)
from tenants.services import create_project, delete_project, key_limits, rename_project, set_key_limits

_P = ParamSpec("_P")


@endpoint("GET", scope=Scope.ADMIN, answer=out.Organization)
async def _show(call: ApiCall) -> HttpResponse:
    """The tenant."""
    return call.respond(await _answered(lambda call: out.organization(_tenant(call)), call))


@endpoint("GET", scope=Scope.ADMIN, answer=out.ProjectList)
async def _projects(call: ApiCall) -> HttpResponse:
    """Its projects, which keys and reports are grouped by."""
    rows = await sync_to_async(list_projects)(call.principal)
    return call.respond(out.ProjectList([out.project_object(row) for row in rows]))


@endpoint("POST", scope=Scope.ADMIN, body=out.NewProject, answer=out.ProjectObject, status=201)
async def _make_project(call: ApiCall) -> HttpResponse:
    """One more."""
    return call.respond(await _answered(_made, call, call.read(out.NewProject)), status=201)


@endpoint("GET", scope=Scope.ADMIN, answer=out.ProjectObject, errors=(404,))
async def _show_project(call: ApiCall, *, project_id: str) -> HttpResponse:
    """One of them."""
    return call.respond(
        await _answered(lambda call: out.project_object(get_project(call.principal, project_id)), call)
    )


@endpoint("POST", scope=Scope.ADMIN, body=out.NewProject, answer=out.ProjectObject, errors=(404,))
async def _rename_project(call: ApiCall, *, project_id: str) -> HttpResponse:
    """Another name for it."""
    return call.respond(await _answered(_renamed, call, project_id, call.read(out.NewProject)))


@endpoint("DELETE", scope=Scope.ADMIN, answer=out.ProjectDeleted, errors=(404,))
async def _delete_project(call: ApiCall, *, project_id: str) -> HttpResponse:
    """Forgets it, where it has no keys."""
    return call.respond(await _answered(_deleted, call, project_id))


@endpoint("GET", scope=Scope.ADMIN, answer=out.MemberList)
async def _members(call: ApiCall) -> HttpResponse:
    """Who belongs to the tenant, and as what."""
    rows = await sync_to_async(list_members)(call.principal)
    return call.respond(out.MemberList([out.member_object(row) for row in rows]))


@endpoint("GET", scope=Scope.ADMIN, answer=out.LimitList)
async def _limits(call: ApiCall) -> HttpResponse:
    """Every limit: of the tier, the tenant, its models and its keys."""
    rows = await sync_to_async(list_limits)(call.principal)
    return call.respond(out.LimitList([out.limit_object(row) for row in rows]))


@endpoint("GET", scope=Scope.ADMIN, answer=out.KeyLimits, errors=(404,))
async def _key_limits(call: ApiCall, *, key_id: str) -> HttpResponse:
    """What a key is limited to."""
    return call.respond(await _answered(_limits_of, call, key_id))


@endpoint("POST", scope=Scope.ADMIN, body=out.KeyLimits, answer=out.KeyLimits, errors=(404,))
async def _limit_key(call: ApiCall, *, key_id: str) -> HttpResponse:
    """Sets its limits, changes them, or takes them away; on every gateway within a second."""
    return call.respond(await _answered(_limited, call, key_id, call.read(out.KeyLimits)))


organization = by_method(GET=_show)
projects = by_method(GET=_projects, POST=_make_project)
project = by_method(GET=_show_project, POST=_rename_project, DELETE=_delete_project)
members = by_method(GET=_members)
limits = by_method(GET=_limits)
limits_of_key = by_method(GET=_key_limits, POST=_limit_key)


async def _answered(
    work: Callable[Concatenate[ApiCall, _P], Any], call: ApiCall, *args: _P.args, **kwargs: _P.kwargs
) -> Any:
    """Runs it in Django's thread, and says in the API's words what it refuses."""
    try:
        return await sync_to_async(work)(call, *args, **kwargs)
    except ApiKeyNotFound:
        raise no_such_key() from None
    except (ProjectNotFound, Project.DoesNotExist):  # the latter was deleted at this moment
        raise NotFound(
            "There is no such project. GET /v1/organization/projects lists yours.", code="project_not_found"
        ) from None
    except ValidationError as error:
        raise invalid_request(error) from None


def _tenant(call: ApiCall) -> Tenant:
    return Tenant.objects.select_related("tier").get(pk=call.principal.tenant_id)


def _made(call: ApiCall, asked: out.NewProject) -> Any:
    return out.project_object(create_project(actor=key_actor(call), tenant=_tenant(call), name=asked.name))


def _renamed(call: ApiCall, project_id: str, asked: out.NewProject) -> Any:
    found = get_project(call.principal, project_id)
    rename_project(actor=key_actor(call), project=found, name=asked.name)
    return out.project_object(get_project(call.principal, project_id))


def _deleted(call: ApiCall, project_id: str) -> Any:
    found = get_project(call.principal, project_id)
    delete_project(actor=key_actor(call), project=found)
    return out.ProjectDeleted(str(found.public_id))


def _limits_of(call: ApiCall, key_id: str) -> Any:
    found = key_limits(get_api_key(call.principal, key_id))
    return out.KeyLimits(**{str(kind): amount for kind, amount in found.items()})


def _limited(call: ApiCall, key_id: str, asked: out.KeyLimits) -> Any:
    api_key = get_api_key(call.principal, key_id)
    if call.principal.is_restricted and str(api_key.public_id) == call.principal.key_public_id:
        raise NotAllowed(
            "A bound key can't change its own limits: use another that may.", code="insufficient_permissions"
        )
    set_key_limits(actor=key_actor(call), api_key=api_key, wanted=asked.named())
    return _limits_of(call, key_id)
