import pytest
import redis
from django.conf import settings

from tenants.models import User


@pytest.mark.django_db
def test_servers_answer():
    assert redis.Redis.from_url(settings.REDIS_URL).ping()
    assert not User.objects.exists()
