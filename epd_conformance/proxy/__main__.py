"""`python -m epd_conformance.proxy`: the proxy as a process of its own, as a stack starts it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from epd_conformance.errors import UsageError
from epd_conformance.proxy.app import ProxyConfig, make_config, serve


def main(argv: list[str] | None = None) -> int:
    """Runs the proxy until a signal ends it. Returns 2 for bad input, after one sentence on stderr."""

    def default(name: str) -> Any:
        return ProxyConfig.model_fields[name].default

    def about(name: str) -> str:
        shown = default(name)
        return f"{ProxyConfig.model_fields[name].description}{f' (default: {shown})' if shown else ''}"

    parser = argparse.ArgumentParser(prog="epd-conformance proxy", description=__doc__)
    for role in ("encode", "prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            action="append",
            default=[],
            metavar="URL",
            help=f"address of a server that does {role}; may be repeated",
        )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free one and prints it")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=default("timeout_s"),
        metavar="S",
        help=about("timeout_s"),
    )
    options = parser.add_argument_group("on demand")
    options.add_argument("--deadline-s", type=float, metavar="S", help=about("deadline_s"))
    options.add_argument("--retries", type=int, default=0, metavar="N", help=about("retries"))
    options.add_argument("--affinity", action="store_true", help=about("affinity"))
    options.add_argument("--group-items", type=int, default=1, metavar="N", help=about("group_items"))
    options.add_argument("--metadata-only", action="store_true", help=about("metadata_only"))
    media = parser.add_argument_group("what a client may name or send")
    media.add_argument(
        "--max-body-bytes", type=int, default=default("max_body_bytes"), metavar="N", help=about("max_body_bytes")
    )
    media.add_argument(
        "--max-item-bytes", type=int, default=default("max_item_bytes"), metavar="N", help=about("max_item_bytes")
    )
    media.add_argument("--media-host", action="append", default=[], metavar="HOST", help=about("media_hosts"))
    media.add_argument("--media-private", action="store_true", help=about("media_private"))
    media.add_argument("--media-root", metavar="DIR", help=about("media_root"))
    media.add_argument("--media-fetch", action="store_true", help=about("media_fetch"))
    parser.add_argument("--stages", metavar="MODULE:CLASS", help="a subclass of Stages to run instead of it")
    args = parser.parse_args(argv)
    try:
        given = vars(args)
        names = {"media_hosts": "media_host"}
        config = make_config(**{name: given[names.get(name, name)] for name in ProxyConfig.model_fields})
        serve(config, args.host, args.port, args.stages)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
