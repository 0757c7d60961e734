"""What an API key looks like: `wr_live_<lookup>_<secret><checksum>`.

- `wr_live_` tells people and secret scanners what it is, in a leaked log as well as in a commit.
- `lookup` (12 letters and digits) finds the row by an index. It is shown in lists and is no secret.
- `secret` (43 letters and digits, 256 random bits) is what must match.
- `checksum` (6 letters and digits: CRC-32 of all before it) lets a scanner tell a real key from a
  look-alike without asking us, and lets us refuse a mistyped or truncated key without the database.

Letters and digits only, so that a double click selects it and no shell or URL needs quoting.
The database holds HMAC-SHA256(pepper, whole key). A slow password hash would add nothing: the secret
has 256 bits, and each request would pay for it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field
from typing import Final

PREFIX: Final = "wr_live_"
DIGEST_BYTES: Final = 32
_ALPHABET: Final = string.digits + string.ascii_letters
_LOOKUP_CHARS: Final = 12
_SECRET_CHARS: Final = 43
_CHECKSUM_CHARS: Final = 6
_SHAPE: Final = re.compile(
    rf"{PREFIX}(?P<lookup>[0-9A-Za-z]{{{_LOOKUP_CHARS}}})_[0-9A-Za-z]{{{_SECRET_CHARS + _CHECKSUM_CHARS}}}",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class KeySecret:
    """A whole key. It masks itself wherever it is printed."""

    lookup_id: str
    reveal: str = field(repr=False)
    """The key as its owner sends it."""


def new_key_secret() -> KeySecret:
    lookup = _random(_LOOKUP_CHARS)
    body = f"{PREFIX}{lookup}_{_random(_SECRET_CHARS)}"
    return KeySecret(lookup_id=lookup, reveal=body + _checksum(body))


def rotated_key_secret(lookup_id: str, *, rotation_id: str, pepper: str) -> KeySecret:
    """The successor of a key: same look-up id, and the same secret for the same rotation id.

    So a rotation whose answer was lost can be asked for again. `rotation_id` is as secret as the key and must be as
    hard to guess; only its digest is stored.
    """
    seed = hmac.new(
        pepper.encode(), f"rotation\0{lookup_id}\0{rotation_id}".encode(), hashlib.sha512
    ).digest()
    number, secret = int.from_bytes(seed, "big"), ""
    for _ in range(_SECRET_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        secret += _ALPHABET[digit]
    body = f"{PREFIX}{lookup_id}_{secret}"
    return KeySecret(lookup_id=lookup_id, reveal=body + _checksum(body))


def digest_rotation_id(rotation_id: str, *, pepper: str) -> bytes:
    return hmac.new(pepper.encode(), f"rotation id\0{rotation_id}".encode(), hashlib.sha256).digest()


def parse_key(token: str) -> KeySecret | None:
    """The key in `token`; None when it can't be one of ours (wrong shape or checksum)."""
    match = _SHAPE.fullmatch(token)
    if match is None or _checksum(token[:-_CHECKSUM_CHARS]) != token[-_CHECKSUM_CHARS:]:
        return None
    return KeySecret(lookup_id=match["lookup"], reveal=token)


def digest_key(key: KeySecret, *, pepper: str) -> bytes:
    """What the database stores for `key`: 32 bytes."""
    return hmac.digest(pepper.encode(), key.reveal.encode("ascii"), "sha256")


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode("ascii"))
    digits = ""
    for _ in range(_CHECKSUM_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits
