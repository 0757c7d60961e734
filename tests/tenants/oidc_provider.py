"""A small OpenID Connect provider on loopback, for tests: it approves whoever `person` names and signs it."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT_ID, CLIENT_SECRET = "weir-at-acme", "a secret of the client"


class Provider:
    def __init__(self) -> None:
        self.person: dict[str, Any] = {}
        self.audience = CLIENT_ID
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._codes: dict[str, dict[str, str]] = {}
        self._tokens: dict[str, dict[str, Any]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.issuer = f"http://127.0.0.1:{self._server.server_port}"

    def _handler(provider) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                if url.path == "/.well-known/openid-configuration":
                    self._json(provider._configuration())
                elif url.path == "/authorize":
                    self._redirect(provider._authorize(query))
                elif url.path == "/jwks":
                    self._json({"keys": [provider._public_key()]})
                elif url.path == "/userinfo":
                    token = self.headers["Authorization"].removeprefix("Bearer ")
                    self._json(provider._tokens[token])
                else:
                    self.send_error(404)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {name: values[0] for name, values in parse_qs(body).items()}
                basic = self.headers.get("Authorization", "")
                answer = provider._token(form, basic)
                self._json(answer, 200 if "access_token" in answer else 400)

            def _json(self, value: Any, status: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _redirect(self, target: str) -> None:
                self.send_response(302)
                self.send_header("Location", target)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def _configuration(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
            "jwks_uri": f"{self.issuer}/jwks",
            "token_endpoint_auth_methods_supported": ["client_secret_post"],
        }

    def _public_key(self) -> dict[str, Any]:
        key: dict[str, Any] = jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        return {**key, "kid": "1", "alg": "RS256", "use": "sig"}

    def _authorize(self, query: dict[str, str]) -> str:
        assert query["client_id"] == CLIENT_ID
        code = secrets.token_urlsafe(16)
        self._codes[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def _token(self, form: dict[str, str], basic: str) -> dict[str, Any]:
        asked = self._codes.pop(form.get("code", ""), None)
        verifier = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(verifier).rstrip(b"=").decode()
        if asked is None or form.get("client_secret") != CLIENT_SECRET:
            return {"error": "invalid_grant"}
        if asked.get("code_challenge") != challenge:
            return {"error": "invalid_grant"}
        now = int(time.time())
        claims = {**self.person, "iss": self.issuer, "aud": self.audience, "iat": now, "exp": now + 300}
        token = secrets.token_urlsafe(16)
        self._tokens[token] = self.person
        signed = jwt.encode(claims, self._key, algorithm="RS256", headers={"kid": "1"})
        return {"access_token": token, "token_type": "Bearer", "expires_in": 300, "id_token": signed}


@contextmanager
def running_provider() -> Iterator[Provider]:
    provider = Provider()
    thread = threading.Thread(target=provider._server.serve_forever, name="oidc-provider", daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        provider._server.shutdown()
        provider._server.server_close()
        thread.join(10)
