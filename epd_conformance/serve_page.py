"""`render --serve`: one page at an address of this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import http.server
import webbrowser
from collections.abc import Callable
from http import HTTPStatus


def serve(text: str, say: Callable[[str], None], browse: Callable[[str], object] = webbrowser.open) -> None:
    """Serve a page on a free port of the loopback interface, and open it in a browser where there is one.

    The page is the only thing that is served: the run's folder may hold what nobody meant to show.
    """
    body = text.encode("utf-8", "replace")

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/"
            self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body) if found else 0))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if found:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """A line for every request helps nobody."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        say(f"the page is at {address}; Ctrl-C ends it")
        # No browser, as on a server, is no error: the address is there to be used.
        with contextlib.suppress(webbrowser.Error):
            browse(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
