"""What needs the database while it can't be reached: an error to come back after, not one of the server's own."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from django.db import OperationalError, connection
from django.db.backends.postgresql.base import DatabaseWrapper

from inference.api.api_errors import as_api_error


@pytest.mark.django_db
def test_no_connection_is_a_503_to_come_back_after():
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        settings = {**connection.settings_dict, "HOST": "127.0.0.1", "PORT": held.getsockname()[1]}
        settings["OPTIONS"] = {"connect_timeout": 5}
        away = DatabaseWrapper(settings, alias="away")
        with pytest.raises(OperationalError) as refused:
            away.ensure_connection()
    error = as_api_error(refused.value)
    assert (error.status, error.code) == (503, "database_unavailable")
    assert error.retry_after_ms
