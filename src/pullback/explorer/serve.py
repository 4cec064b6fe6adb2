"""The server of the explorer, in a thread of its own."""

from __future__ import annotations

import html
import secrets
import socket
import threading
import time
import webbrowser

import uvicorn

from pullback.explorer.app import make_app
from pullback.explorer.model import Model
from pullback.explorer.security import LOCAL

# Seconds to wait for the server to listen.
START_LIMIT = 10.0


class Explorer:
    """A running explorer. In a notebook it shows itself; `stop` ends it, and so does the end of the program.

    Attributes:
        url: the address to open; with a token if others can reach it.
    """

    def __init__(self, model: Model, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.create_server((host, port))
        token = None if host in LOCAL else secrets.token_urlsafe(24)
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/" + (f"#token={token}" if token else "")
        config = uvicorn.Config(
            make_app(model, token=token), log_level="warning", server_header=False, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        self._wait_until_started()

    def _wait_until_started(self) -> None:
        end = time.monotonic() + START_LIMIT
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise RuntimeError(f"The server did not start within {START_LIMIT:.0f} s. Try another port=.")
            time.sleep(0.01)

    def open(self) -> None:
        """Opens the page in the browser."""
        webbrowser.open(self.url)

    def wait(self) -> None:
        """Serves until Ctrl-C or `stop`."""
        try:
            while self._thread.is_alive():
                self._thread.join(0.5)
        except KeyboardInterrupt:
            self.stop()

    def stop(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()

    def _repr_html_(self) -> str:
        address = html.escape(self.url)
        return f'<iframe src="{address}" title="explorer" width="100%" height="820" style="border:0"></iframe>'

    def __repr__(self) -> str:
        return f"Explorer({self.url})"
