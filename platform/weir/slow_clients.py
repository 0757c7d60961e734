"""How patient a gateway is, whatever it runs on; a proxy before it is as patient (`deploy/nginx/weir.conf`)."""

from __future__ import annotations

from typing import Final

STALL_S: Final = 30.0
"""Who reads nothing for so long is cut off."""
HEADERS_S: Final = 10.0
"""A request's line and headers come within it, counted from its first byte, or from the connection's begin."""
BODY_S: Final = 10.0
BODY_PACE: Final = 4096
"""So many bytes of a body come in each BODY_S."""
