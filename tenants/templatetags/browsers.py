"""How the console names the program that somebody signed in with."""

from __future__ import annotations

from django import template
from ua_parser import parse

register = template.Library()


@register.filter
def browser(user_agent: str) -> str:
    """ "Chrome 131 on Linux"; of a program that nobody knows, its own words."""
    found = parse(user_agent[:400])
    if found.user_agent is None:
        return user_agent.strip()[:80] or "A program that does not say its name"
    name = " ".join(filter(None, (found.user_agent.family, found.user_agent.major)))
    return name if found.os is None else f"{name} on {found.os.family}"
