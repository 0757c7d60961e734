"""Signing in and out of the console."""

from __future__ import annotations

import pytest
from django.test import Client

from tenants.models import User


@pytest.mark.django_db
def test_sign_in_and_out(client: Client):
    User.objects.create_user("ada@example.com", "a long enough password")
    refused = client.post("/login/", {"login": "ada@example.com", "password": "wrong"})
    assert refused.status_code == 200
    assert b"do not match an account" in refused.content
    accepted = client.post("/login/", {"login": "ada@example.com", "password": "a long enough password"})
    assert accepted.status_code == 302
    assert "_auth_user_id" in client.session
    client.post("/logout/")
    assert "_auth_user_id" not in client.session


@pytest.mark.django_db
def test_sign_in_never_redirects_to_another_site(client: Client):
    User.objects.create_user("ada@example.com", "a long enough password")
    response = client.post(
        "/login/?next=https://evil.example/",
        {
            "login": "ada@example.com",
            "password": "a long enough password",
            "next": "https://evil.example/",
        },
    )
    assert response.status_code == 302
    assert "evil.example" not in response.headers["Location"]
