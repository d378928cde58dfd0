"""`python -m epd_conformance.proxy`: the proxy as a process of its own, as a stack starts it."""

from __future__ import annotations

import argparse
import sys

from epd_conformance.errors import UsageError
from epd_conformance.proxy.app import ProxyConfig, make_config, serve


def main(argv: list[str] | None = None) -> int:
    """Runs the proxy until a signal ends it. Returns 2 for bad input, after one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m epd_conformance.proxy", description=__doc__)
    for role in ("encode", "prefill", "decode"):
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="URL", help=f"a {role} server; may be repeated"
        )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free one and prints it")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=ProxyConfig.model_fields["timeout_s"].default,
        help="seconds that an upstream may stay silent (default: %(default)s)",
    )
    parser.add_argument("--stages", metavar="MODULE:CLASS", help="a subclass of Stages to run instead of it")
    args = parser.parse_args(argv)
    try:
        config = make_config(encode=args.encode, prefill=args.prefill, decode=args.decode, timeout_s=args.timeout_s)
        serve(config, args.host, args.port, args.stages)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
