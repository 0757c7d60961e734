"""What the operator decided is at hand, whatever the database does meanwhile."""

from __future__ import annotations

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connection

from inference.models import Maintenance
from inference.site_policy import SitePolicy

pytestmark = pytest.mark.django_db(transaction=True)


async def test_a_database_that_does_not_answer_is_waited_for_once_not_by_each_request():
    """Known keys go on being served, and not a wait apart."""
    await sync_to_async(Maintenance.objects.create)(pk=1, is_on=True, message="Back soon.", retry_after_s=60)
    policy = SitePolicy()
    assert (await policy.current()).maintenance == ("Back soon.", 60)
    settings = connection.settings_dict
    held = await psycopg.AsyncConnection.connect(
        host=settings["HOST"], port=settings["PORT"] or None, user=settings["USER"],
        password=settings["PASSWORD"], dbname=settings["NAME"],
    )  # fmt: skip
    await held.execute("LOCK TABLE inference_maintenance IN ACCESS EXCLUSIVE MODE")
    try:
        policy._asked_at -= 10
        assert (await policy.current()).maintenance == ("Back soon.", 60)
        # The next request is answered in the same breath.
        asked = policy.current()
        with pytest.raises(StopIteration) as answer:
            asked.send(None)
        assert answer.value.value.maintenance == ("Back soon.", 60)
    finally:
        await held.close()
        await policy.aclose()
    policy._asked_at -= 10
    await sync_to_async(Maintenance.objects.update)(is_on=False)
    assert (await policy.current()).maintenance is None
