"""What stands between the network and the explorer: who may ask, how much, and what a page may load."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL = ("127.0.0.1", "localhost", "[::1]")
# Bytes of a body: a lasso around all codes that are drawn takes about 20,000.
MAX_BODY = 65_536
# Plotly sets style attributes and writes rules into a style element, so styles may stand in the page; scripts may not.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self' http://localhost:* http://127.0.0.1:*",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Refused(Exception):
    """A request that is not answered: the status code and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Gate:
    """Refuses foreign hosts, requests without the token and bodies that are not JSON; adds the headers of every answer.

    Args:
        app: what answers.
        token: that ``/api`` asks for, or None on the local machine, where the name of the host is checked instead. (A
            page elsewhere can make a browser send requests here, under its own name for this machine, but neither of
            the two right.)
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        try:
            self._check(Request(scope))
        except Refused as refusal:
            answer = JSONResponse({"error": str(refusal)}, refusal.status)
            await answer(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)

    def _check(self, request: Request) -> None:
        if self.token is None and _name_of_host(request) not in LOCAL:
            raise Refused(421, "This explorer answers to 127.0.0.1 and localhost alone.")
        if not request.url.path.startswith("/api/"):
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.token is not None and not secrets.compare_digest(given.encode(), self.token.encode()):
            raise Refused(
                401, "The token is missing or wrong. Open the address that was printed when the explorer started."
            )
        if (
            request.method == "POST"
            and request.headers.get("content-type", "").split(";")[0].strip() != "application/json"
        ):
            raise Refused(415, "The body must be JSON, with the content type application/json.")


def _name_of_host(request: Request) -> str:
    """The host without the port; an address of IPv6 stands in brackets and has colons of its own."""
    host = request.headers.get("host", "")
    return host if host.endswith("]") else host.rsplit(":", 1)[0]


async def body_of(request: Request) -> bytes:
    """The whole body, or a refusal as soon as it is too long."""
    announced = request.headers.get("content-length", "0")
    parts, size = [], int(announced) if announced.isdecimal() else 0
    if size <= MAX_BODY:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY:
                break
            parts.append(part)
    if size > MAX_BODY:
        raise Refused(413, f"The body is longer than {MAX_BODY} bytes.")
    return b"".join(parts)
