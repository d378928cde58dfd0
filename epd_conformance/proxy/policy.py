"""Which media a client may name: schemes, hosts, sizes; so that nobody can make the servers, or the proxy, fetch from inside.

The proxy never fetches unless `media_fetch` is set: the servers do, each on its own. What is checked here is therefore what
can be checked before: the URL, and the addresses to which its host resolves now. Redirects that a server follows, and a name
that resolves otherwise a moment later, escape that; with `media_fetch` they do not, because then the addresses that were
checked are those that are connected to, each redirect is checked too, and the servers get `data:` URLs.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import posixpath
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote, urljoin

import aiohttp
from aiohttp.abc import AbstractResolver

from epd_conformance.proxy.config import ProxyConfig
from epd_conformance.proxy.upstreams import StageError

# Stricter than any URL parser, because the parsers of proxy and servers differ: no user info, no backslash, no blank or
# control character, no escape or non-ASCII letter in the host.
_HTTP_URL = re.compile(r"(https?)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?([/?#][^\s\\\x00-\x1f\x7f]*)?", re.I)
_FILE_URL = re.compile(r"file://(?:localhost)?(/[^\s\\\x00-\x1f\x7f?#]*)", re.I)

# IPv6 networks that carry an IPv4 address in their last bytes (NAT64, RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

# A name that is not found in this time is refused: a client must not be able to hold many look-ups open.
RESOLVE_S = 5.0

# As many redirects as a picture on the web usually needs, and no loop.
REDIRECTS = 3

# Time for one item, headers and body.
FETCH_S = 30.0

# What a parser that forgives blanks in front might fetch.
_ADDRESS = re.compile(r"[\s\x00-\x20]*(https?|file|data):", re.I)

# Where chat, Responses and Messages requests name something to be fetched.
_URL_KEYS = ("image_url", "input_image", "audio_url", "video_url", "file_url", "source")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address belongs to the open internet, also the one that an IPv6 address carries inside."""
    if isinstance(address, ipaddress.IPv6Address):
        inner: list[Address] = [found for found in (address.ipv4_mapped, address.sixtofour) if found is not None]
        inner += list(address.teredo or ())
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if not all(is_public(found) for found in inner):
            return False
    return address.is_global and not address.is_multicast


def urls_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value that a server might fetch as media, whatever the API; `source` may be something else, so
    only what looks like an address counts."""
    left = [value]
    while left:
        here = left.pop()
        if isinstance(here, list):
            left.extend(here)
        elif isinstance(here, dict):
            for key in _URL_KEYS:
                named = here.get(key)
                if isinstance(named, dict):
                    named = named.get("url")
                if isinstance(named, str) and _ADDRESS.match(named):
                    yield named
            left.extend(found for found in here.values() if isinstance(found, dict | list))


class MediaPolicy:
    """Checks, and on demand fetches, the media of a request. Raises StageError (400, 413, 422; stage "proxy")."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config

    @staticmethod
    def _refused(why: str, item: int | None, code: int = 400) -> StageError:
        about = "media" if item is None else f"media item {item}"
        return StageError(f"{about}: {why}", code=code, stage="proxy", item=item)

    async def check_url(self, url: str, item: int | None = None) -> None:
        """Refuses a URL that no server shall fetch."""
        if url[:5].lower() == "data:":
            self.check_size(len(url) - url.find(",") - 1, item)
            return
        scheme = url.partition(":")[0].lower()
        if scheme == "file":
            self._check_file(url, item)
        elif scheme in ("http", "https"):
            found = _HTTP_URL.fullmatch(url)
            if found is None:
                raise self._refused(
                    "the URL is malformed, or has a part that is not taken (user, backslash, blank)", item
                )
            await self._check_host(found[2], item)
        else:
            raise self._refused("a URL must begin with http:, https:, data: or file:", item)

    def check_size(self, encoded: int, item: int | None) -> None:
        """Refuses base64 text of this length where the bytes would be more than an item may have."""
        if encoded // 4 * 3 > self.config.max_item_bytes:
            raise self._refused(f"more than {self.config.max_item_bytes} bytes", item, 413)

    def _check_file(self, url: str, item: int | None) -> None:
        root = self.config.media_root
        if root is None:
            raise self._refused("file URLs are not allowed here (--media-root)", item)
        found = _FILE_URL.fullmatch(url)
        # Twice, because a path that needs to be decoded twice is none that anybody has written by mistake.
        path = unquote(unquote(found[1])) if found else ""
        inside = posixpath.normpath(path).startswith(posixpath.normpath(root).rstrip("/") + "/")
        if not inside or "\0" in path or ".." in path.split("/"):
            raise self._refused(f"a file URL must point below {root}", item)

    def _listed(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        return any(
            host.endswith(known[1:]) if known.startswith("*.") else host == known for known in self.config.media_hosts
        )

    async def _check_host(self, host: str, item: int | None) -> None:
        if self.config.media_hosts:
            if not self._listed(host):
                raise self._refused(f"the host {host} is not among those that are allowed (--media-host)", item)
            return
        if self.config.media_private:
            return
        try:
            async with asyncio.timeout(RESOLVE_S):
                addresses = await self.resolve(host.strip("[]"))
        except (OSError, UnicodeError):
            # TimeoutError is an OSError too.
            raise self._refused(f"the host {host} cannot be resolved", item) from None
        if not all(is_public(address) for address in addresses):
            raise self._refused(f"the host {host} is not public (--media-host, --media-private)", item)

    async def resolve(self, host: str) -> list[Address]:
        """All addresses of a host. Raises OSError where there are none."""
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        # A scope (`%eth0`) only stands behind link-local addresses, which are not public with or without it.
        return [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in found]

    @asynccontextmanager
    async def fetcher(self) -> AsyncIterator[Fetcher]:
        """What fetches media, for the life of the proxy."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=_CheckedResolver(self), use_dns_cache=False, force_close=True),
            timeout=aiohttp.ClientTimeout(total=FETCH_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield Fetcher(self, session)


class _CheckedResolver(AbstractResolver):  # type: ignore[misc]
    """Resolves for one connection and refuses there and then, so that nothing lies between the check and the use."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[dict[str, Any]]:
        addresses = await self._policy.resolve(host)
        config = self._policy.config
        if not config.media_private and not config.media_hosts and not all(map(is_public, addresses)):
            raise OSError(f"{host} is not public")
        return [
            {
                "hostname": host,
                "host": str(address),
                "port": port,
                "family": socket.AF_INET6 if address.version == 6 else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in addresses
        ]

    async def close(self) -> None:
        return


class Fetcher:
    """Fetches what http(s) URLs name."""

    def __init__(self, policy: MediaPolicy, session: Any) -> None:
        self._policy = policy
        self._session = session

    async def data_url(self, url: str, item: int) -> str:
        """The content behind `url` as a data URL. Raises StageError: 413 where it is too large, 422 where it cannot be had."""
        refused = self._policy._refused
        try:
            for _ in range(REDIRECTS + 1):
                await self._policy.check_url(url, item)
                async with self._session.get(url, allow_redirects=False) as answer:
                    if answer.status in (301, 302, 303, 307, 308):
                        url = urljoin(url, answer.headers.get("Location", ""))
                        if url[:4].lower() != "http":
                            raise refused("a redirect leads to something that is not http", item, 422)
                        continue
                    if answer.status != 200:
                        raise refused(f"its server answered {answer.status}", item, 422)
                    return await self._encoded(answer, item)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise refused(f"it cannot be fetched ({type(error).__name__})", item, 422) from error
        raise refused(f"more than {REDIRECTS} redirects", item, 422)

    async def _encoded(self, answer: Any, item: int) -> str:
        limit = self._policy.config.max_item_bytes
        pieces: list[bytes] = []
        size = 0
        async for piece in answer.content.iter_any():
            size += len(piece)
            if size > limit:
                raise self._policy._refused(f"more than {limit} bytes", item, 413)
            pieces.append(piece)
        kind = (
            answer.content_type
            if re.fullmatch(r"[\w.+-]+/[\w.+-]+", answer.content_type)
            else "application/octet-stream"
        )
        return f"data:{kind};base64,{base64.b64encode(b''.join(pieces)).decode()}"
