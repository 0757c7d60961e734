"""The one settings file: everything comes from the environment, malformed values are fatal with the variable's name."""

from __future__ import annotations

from pathlib import Path

from environs import Env

from weir.csp import STRICT

env = Env()
BASE_DIR = Path(__file__).resolve().parent.parent.parent
VAR_DIR = env.path("WEIR_VAR_DIR", default=BASE_DIR / "var")

DEBUG = env.bool("WEIR_DEBUG", default=False)
SECRET_KEY = env.str("WEIR_SECRET_KEY", default="insecure-until-set")
ALLOWED_HOSTS = env.list("WEIR_ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "daphne",
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "tenants",
    "inference",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "weir.csp.ContentSecurityPolicyMiddleware",
]
ROOT_URLCONF = "weir.urls"
ASGI_APPLICATION = "weir.asgi.application"
AUTH_USER_MODEL = "tenants.User"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASE_URL = env.str("DATABASE_URL")
DATABASES = {"default": env.dj_db_url("DATABASE_URL")}
REDIS_URL = env.str("REDIS_URL")

CONTENT_SECURITY_POLICY = {"DIRECTIVES": STRICT}

USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "/static/"
STATIC_ROOT = env.str("WEIR_STATIC_ROOT", default=None)
"""Where collectstatic puts files, for installations that serve them elsewhere; unset, they come from the packages."""
WHITENOISE_USE_FINDERS = STATIC_ROOT is None
STATICFILES_DIRS = [BASE_DIR / "templates" / "static"]
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"

API_KEY_PEPPER = env.str("WEIR_API_KEY_PEPPER", default=SECRET_KEY)
"""Keys the HMAC of API keys: changing it invalidates every key."""
