"""The one settings file: everything comes from the environment, malformed values are fatal by name."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dj_database_url
import dj_email_url
from django.templatetags.static import static

from weir import places
from weir.csp import STRICT
from weir.environment import BadEnvironment, Environment, generated_secret
from weir.logs import logging_config
from weir.operator_menu import operator_menu
from weir.patient_connection import PatientConnection
from weir.redis_urls import celery_broker, channels_host, check_redis_url
from weir.servers import DAPHNE, SERVERS

env = Environment()
BASE_DIR = Path(__file__).resolve().parent.parent.parent
VAR_DIR = env.path("WEIR_VAR_DIR", BASE_DIR / "var")
"""Everything that this installation keeps on disk."""

# --- where it is reached ---------------------------------------------------------------------------
BIND_HOST = env.text("WEIR_HOST", "127.0.0.1")
BIND_PORT = env.number("WEIR_PORT", 8000, least=1, most=65535)
SERVER = env.choice("WEIR_SERVER", DAPHNE, SERVERS)
"""What `up` runs the gateway on."""
BASE_URL = env.text("WEIR_BASE_URL", f"http://localhost:{BIND_PORT}").rstrip("/")
"""What people and SDKs type; https here switches on what plain HTTP can't have."""
if urlsplit(BASE_URL).scheme not in {"http", "https"} or not urlsplit(BASE_URL).hostname:
    raise BadEnvironment(f"WEIR_BASE_URL is {BASE_URL!r}, but should be like https://weir.example.com")
ALLOWED_HOSTS = env.items(
    "WEIR_ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]", str(urlsplit(BASE_URL).hostname)]
)
CSRF_TRUSTED_ORIGINS = env.items("WEIR_TRUSTED_ORIGINS", [BASE_URL])

# --- security --------------------------------------------------------------------------------------
DEBUG = env.flag("WEIR_DEBUG", False)
_given_secret_key = env.secret("WEIR_SECRET_KEY")
SECRET_KEY = _given_secret_key or generated_secret(VAR_DIR / "secrets" / "secret_key", "WEIR_SECRET_KEY")
_given_pepper = env.secret("WEIR_API_KEY_PEPPER")
API_KEY_PEPPER = _given_pepper or generated_secret(
    VAR_DIR / "secrets" / "api_key_pepper", "WEIR_API_KEY_PEPPER"
)
"""Keys the HMAC of API keys: changing it invalidates every key."""
SECRETS_ARE_GENERATED = not (_given_secret_key and _given_pepper)

_over_https = BASE_URL.startswith("https://")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _over_https
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
SECURE_SSL_REDIRECT = False  # the proxy in front redirects; behind it this would loop
# W008 wants that redirect; W005 and W021 want HSTS for every subdomain of a domain that is not ours to decide about.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W008", "security.W021"]
SECURE_HSTS_SECONDS = 31_536_000 if _over_https and not DEBUG else 0
# A client can send this header too: trusted only where a proxy that overwrites it is known to be in front.
BEHIND_PROXY = env.flag("WEIR_BEHIND_PROXY", False)
if BEHIND_PROXY:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {"DIRECTIVES": STRICT}

# --- applications ----------------------------------------------------------------------------------
INSTALLED_APPS = [
    "daphne",
    "weir",
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.usersessions",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "channels",
    "tenants",
    "inference",
]
MIDDLEWARE = [
    "weir.logs.RequestIdMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "weir.static_files.StaticFilesMiddleware",
    "weir.page_compression.PageCompressionMiddleware",
    # Outside of all that may fail: the pages that say so have these headers too.
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "weir.csp.ContentSecurityPolicyMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "tenants.account.StaffMfaMiddleware",
    "tenants.conflicts.ConflictMiddleware",
    "weir.viewers_zone.viewers_zone",
    *(["weir.row_security.operator_rows"] if env.flag("WEIR_ROW_SECURITY", False) else []),
]
API_MIDDLEWARE = ["weir.logs.RequestIdMiddleware"]
"""For what is under /v1: async only; a sync one would cost every request a thread (see asgi.py)."""
ROOT_URLCONF = "weir.urls"
CSRF_FAILURE_VIEW = "inference.outside_views.csrf_failure"
ASGI_APPLICATION = "weir.asgi.application"
AUTH_USER_MODEL = "tenants.User"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"
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
                "inference.notices.site_notices",
                "tenants.console.about_the_visitor",
            ],
        },
    },
]
UNFOLD = {
    "SITE_TITLE": "Weir operator",
    "SITE_HEADER": "Weir",
    "SITE_SUBHEADER": "Operator",
    "SITE_URL": "/",
    "SITE_DROPDOWN": [{"icon": "terminal", "title": "Console", "link": "/"}],
    "SIDEBAR": {"navigation": operator_menu()},
    "SITE_ICON": lambda request: static("weir/logo.svg"),
    "STYLES": [lambda request: static("weir/operator.css")],
    "SCRIPTS": [lambda request: static("weir/zone.js"), lambda request: static("weir/operator.js")],
    "SITE_FAVICONS": [
        {"rel": "icon", "type": "image/svg+xml", "href": lambda request: static("weir/logo.svg")}
    ],
    # The console's accent, from its lightest to its darkest.
    "COLORS": {
        "primary": {
            "50": "#f0faf8", "100": "#dff0ed", "200": "#bfe3dd", "300": "#8fd2c8", "400": "#5fcabb",
            "500": "#1f9486", "600": "#0b6b62", "700": "#08544d", "800": "#0c423d", "900": "#12332f",
            "950": "#05211d",
        }
    },
}  # fmt: skip
USE_TZ = True
FORMAT_MODULE_PATH = "weir.formats"
TIME_ZONE = "UTC"
STATIC_URL = "/static/"
STATIC_ROOT = env.path("WEIR_STATIC_ROOT", VAR_DIR / "static")
"""Where collectstatic puts files, compressed and named by their content; what is not there comes from the packages."""
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "weir.static_files.CollectedFiles"},
}
WHITENOISE_USE_FINDERS = True
STATICFILES_DIRS = [BASE_DIR / "templates" / "static"]

# --- state -----------------------------------------------------------------------------------------
_given_database_url = env.secret("DATABASE_URL")
_given_redis_url = env.secret("REDIS_URL")
DATABASE_IS_EMBEDDED = _given_database_url is None
REDIS_IS_EMBEDDED = _given_redis_url is None
DATABASE_URL = _given_database_url or places.database_url(VAR_DIR)
REDIS_URL = _given_redis_url or places.redis_url(VAR_DIR)

_pool = {
    "connection_class": PatientConnection,
    "min_size": 1,
    "max_size": env.number("WEIR_DATABASE_POOL", 10, least=1, most=1000),
    "timeout": 5.0,
}


def _database(name: str, url: str) -> dict[str, Any]:
    """Django's settings for the database of the variable `name`."""
    wanted = f"{name} must name a PostgreSQL database: postgres://USER:PASSWORD@HOST:PORT/NAME"
    try:
        parsed = dj_database_url.parse(url)
    except ValueError as error:
        # Its message repeats the URL, which holds a password.
        raise BadEnvironment(wanted) from error
    if parsed.get("ENGINE") != "django.db.backends.postgresql" or not parsed.get("NAME"):
        raise BadEnvironment(wanted)
    return {
        **parsed,
        "CONN_MAX_AGE": 0,  # the pool keeps connections; a persistent one would never go back to it
        "DISABLE_SERVER_SIDE_CURSORS": True,  # for poolers: see tenants/large_reads.py
        "OPTIONS": {**parsed.get("OPTIONS", {}), "connect_timeout": 5, "pool": _pool},
    }


DATABASES = {"default": _database("DATABASE_URL", DATABASE_URL)}
_replica_url = env.secret("WEIR_REPLICA_URL")
"""A streaming replica, where reports are read; None: they are read where all is."""
REPLICA_MAX_LAG_S = env.number("WEIR_REPLICA_MAX_LAG_S", 60, least=1, most=86_400)
"""Further behind than this it is not asked: the primary is."""
if _replica_url:
    _replica = _database("WEIR_REPLICA_URL", _replica_url)
    # There is another place to read: who came before it was known to be away gives up soon.
    _replica["OPTIONS"] |= {
        "pool": {**_pool, "timeout": 2.0, "reconnect_timeout": 2.0},
        "tcp_user_timeout": 10_000,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 2,
    }
    DATABASES["replica"] = {**_replica, "TEST": {"MIRROR": "default"}}
    DATABASE_ROUTERS = ["inference.replica.ReplicaRouter"]

ROW_SECURITY = env.flag("WEIR_ROW_SECURITY", False)
"""Tells PostgreSQL with each connection whose rows it may see: where DATABASE_URL names the role weir_gateway."""

check_redis_url("REDIS_URL", REDIS_URL)
CHANNELS_URL = env.secret("WEIR_CHANNELS_URL") or REDIS_URL
"""The channel layer's and the cache's, which can't use a cluster: one server, or a master that Sentinel names."""
CACHES = {
    # What counts failed sign-ins: shared, so that guesses are counted over all gateways.
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": [CHANNELS_URL],  # a list: a text would be split at its commas
        "KEY_PREFIX": "weir:cache",
        "OPTIONS": {
            "pool_class": "weir.redis_urls.CachePool",
            "socket_timeout": 5,
            "socket_connect_timeout": 5,
        },
    }
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.core.RedisChannelLayer",
        "CONFIG": {"hosts": [channels_host("WEIR_CHANNELS_URL", CHANNELS_URL)], "prefix": "weir:channels"},
    }
}

# --- mail ------------------------------------------------------------------------------------------
_smtp_url = env.secret("WEIR_SMTP_URL")
"""None: nothing is mailed; alerts show in the console alone."""
DEFAULT_FROM_EMAIL = SERVER_EMAIL = env.text("WEIR_MAIL_FROM", f"weir@{urlsplit(BASE_URL).hostname}")
EMAIL_BACKEND = "django.core.mail.backends.dummy.EmailBackend"
if _smtp_url is not None:
    try:
        vars().update(dj_email_url.parse(_smtp_url))
    except (KeyError, ValueError) as error:
        # Its message may repeat the URL, which holds a password.
        raise BadEnvironment("WEIR_SMTP_URL should be like submission://USER:PASSWORD@HOST:587") from error
EMAIL_TIMEOUT = 15
MAIL_IS_SENT = _smtp_url is not None

# --- people: signing in, by django-allauth ---------------------------------------------------------
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
ACCOUNT_ADAPTER = "tenants.account.AccountAdapter"
ACCOUNT_FORMS = {"login": "tenants.forms.SignInForm"}
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*"]
ACCOUNT_SIGNUP_ENABLED = False  # accounts come by the operator, by invitation, or by a tenant's own sign-in
ACCOUNT_EMAIL_VERIFICATION = env.choice(
    "WEIR_EMAIL_VERIFICATION", "optional", ("none", "optional", "mandatory")
)
if ACCOUNT_EMAIL_VERIFICATION == "mandatory" and not MAIL_IS_SENT:
    raise BadEnvironment(
        "WEIR_EMAIL_VERIFICATION is mandatory, but WEIR_SMTP_URL is not set: nobody could sign in"
    )
ACCOUNT_CHANGE_EMAIL = True  # one address each; the old one holds until the new one is confirmed
ACCOUNT_CONFIRM_EMAIL_ON_GET = False  # mail scanners follow links
ACCOUNT_EMAIL_SUBJECT_PREFIX = "[Weir] "
ACCOUNT_EMAIL_UNKNOWN_ACCOUNTS = False  # strangers get no mail from us because someone typed their address
ACCOUNT_EMAIL_NOTIFICATIONS = MAIL_IS_SENT
ACCOUNT_DEFAULT_HTTP_PROTOCOL = "https" if _over_https else "http"
ACCOUNT_SESSION_REMEMBER = True
ACCOUNT_LOGOUT_REDIRECT_URL = "/"
ACCOUNT_RATE_LIMITS = {
    # Of failures: an address's guesses over all accounts, and everyone's guesses at one account.
    "login_failed": "10/m/ip,5/300s/key",
    "login": "60/m/ip",  # a whole office signs in from one address
}
SOCIALACCOUNT_ADAPTER = "tenants.single_sign_on.SignOnAdapter"
SOCIALACCOUNT_LOGIN_ON_GET = True  # a form could not lead to the provider: form-action is ours alone
SOCIALACCOUNT_STORE_TOKENS = False
SOCIALACCOUNT_EMAIL_AUTHENTICATION = False
SOCIALACCOUNT_EMAIL_VERIFICATION = "none"  # the provider has confirmed it, or tenants.single_sign_on refuses
SOCIALACCOUNT_REQUESTS_TIMEOUT = 10
MFA_ADAPTER = "tenants.account.MfaAdapter"
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_TOTP_ISSUER = "Weir"
MFA_TOTP_TOLERANCE = 1  # a clock may be half a minute off
MFA_ALLOW_UNVERIFIED_EMAIL = True  # nobody can sign up with another's address here
MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN = not _over_https
STAFF_NEED_MFA = env.flag("WEIR_STAFF_MFA", False)
"""Operators see the admin only with a second factor set up."""

# --- webhooks --------------------------------------------------------------------------------------
try:
    WEBHOOK_NETWORKS = [ip_network(network) for network in env.items("WEIR_WEBHOOK_NETWORKS", [])]
    """Networks that alerts may be sent to although they are not public, and then over plain HTTP too."""
except ValueError as error:
    raise BadEnvironment(f"WEIR_WEBHOOK_NETWORKS should be networks such as 10.1.0.0/16: {error}") from error

# --- what the API keeps ----------------------------------------------------------------------------
RESPONSE_DAYS = env.number("WEIR_RESPONSE_DAYS", 30, least=1, most=3650)
"""So long can a stored response be fetched and continued."""
FILE_MAX_MB = env.number("WEIR_FILE_MAX_MB", 64, least=1, most=200)
FILES_PER_TENANT_MB = env.number("WEIR_FILES_PER_TENANT_MB", 1024, least=1, most=1_000_000)
BATCH_TIER = env.text("WEIR_BATCH_TIER", "batch")
"""In which the lines of batches run, where the key's own tier is better."""

# --- tenants that are deleted ----------------------------------------------------------------------
DELETION_GRACE_DAYS = env.number("WEIR_DELETION_GRACE_DAYS", 30, least=0, most=3650)
"""So long an owner can take a deletion back."""

# --- the ledger ------------------------------------------------------------------------------------
LEDGER_KEPT_MONTHS = env.number("WEIR_LEDGER_KEPT_MONTHS", 0, least=0, most=1200)
"""Single requests are forgotten when so many whole months have passed since theirs; 0 keeps them for ever."""

# --- background work -------------------------------------------------------------------------------
_celery_url = env.secret("WEIR_CELERY_URL") or REDIS_URL
"""Celery can't use a cluster either."""
CELERY_BROKER_URL, _celery_options = celery_broker("WEIR_CELERY_URL", _celery_url)
CELERY_BROKER_TRANSPORT_OPTIONS = {
    **_celery_options,
    "global_keyprefix": "weir:celery:",
    "visibility_timeout": 900,  # a lost worker's tasks come back after this: longer than any task may run
    "socket_timeout": 10,
    "socket_connect_timeout": 5,
}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True  # tasks are idempotent: better twice than lost
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_SOFT_TIME_LIMIT = 240
CELERY_TASK_TIME_LIMIT = 300
CELERY_TASK_DEFAULT_QUEUE = "weir"
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_CONCURRENCY = env.number("WEIR_CELERY_CONCURRENCY", 2, least=1, most=256)
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_TIMEZONE = "UTC"

# --- the model served by `up` ----------------------------------------------------------------------
MODEL = env.text("WEIR_MODEL", "smollm2-135m-instruct")
"""The default model by name, a Hugging Face directory, or a GGUF file."""
MODEL_NAME = env.text("WEIR_MODEL_NAME", "")
"""What clients call it; unset, the last part of WEIR_MODEL."""

EXPECTED_MODELS = env.items("WEIR_EXPECTED_MODELS", [])
"""Asked for before a worker has registered them they are on their way, and not unknown. `up` names its own."""

DEMO = env.flag("WEIR_DEMO", True)
"""`up` makes an operator, a tenant and a key; without, whoever opens the link that it prints makes them."""

# --- metrics ---------------------------------------------------------------------------------------
METRICS_TOKEN = env.secret("WEIR_METRICS_TOKEN")
"""What Prometheus must send to read a gateway's /metrics; None: there is no such page."""
GATEWAY_DRAIN_S = env.number("WEIR_GATEWAY_DRAIN_S", 10, least=0, most=3600)
"""A gateway that is told to stop lets open answers go on for so long; see stopping.py."""
OPERATOR_TOKEN = env.secret("WEIR_OPERATOR_TOKEN")
"""What a program must send to command workers under /operator/; None: only people who are operators do."""
_celery_metrics_port = env.number("WEIR_CELERY_METRICS_PORT", 0, least=0, most=65535)
CELERY_METRICS_PORT = _celery_metrics_port or None
CELERY_METRICS_HOST = env.text("WEIR_CELERY_METRICS_HOST", "127.0.0.1")

# --- traces ----------------------------------------------------------------------------------------
TRACING = env.flag("WEIR_TRACING", False)
"""Spans go by OTLP to where OTEL_EXPORTER_OTLP_ENDPOINT says; needs the extra `tracing`."""

# --- logs ------------------------------------------------------------------------------------------
LOG_FORMAT = env.choice("WEIR_LOG_FORMAT", "console", ("console", "json"))
LOG_LEVEL = env.choice("WEIR_LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"))
LOGGING = logging_config(as_json=LOG_FORMAT == "json", level=LOG_LEVEL)
