"""A stand-in for vLLM's API server, and for the proxy: answers /health and /v1/models on `--port`.

The environment says what it does instead of serving: STANDIN_DIES=NAME (the server of that name, or `proxy`, ends at once with
STANDIN_SAYS in its log), STANDIN_SILENT=NAME (it never answers), STANDIN_SLOW=SECONDS (everybody answers only then).
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "epd-model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    name = os.environ.get("EPD_SERVER", "proxy")
    if os.environ.get("STANDIN_DIES") == name:
        sys.exit(os.environ.get("STANDIN_SAYS", "RuntimeError: of no use"))
    if os.environ.get("STANDIN_SILENT") == name:
        time.sleep(600)
    time.sleep(float(os.environ.get("STANDIN_SLOW", "0")))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
