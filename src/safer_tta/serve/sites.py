"""Whose page a request comes from, and which host it was sent to."""

import re

from starlette.datastructures import Headers

from .limits import Refused

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
SAME = {"same-origin", "none"}  # what browsers send with a page's own requests, and with a typed address
PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?", re.IGNORECASE)
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)", re.IGNORECASE)
Place = tuple[str, int | None]  # host and port


def check_host(headers: Headers, *, tokens: bool) -> Place:
    """Refuse a request to another name of this machine, which a page of another site may have made up."""
    given = headers.get("host", "")  # HTTP/1.0 knows none, and some health checks speak it
    host, port = _parse(given, "Host") if given else ("", None)
    if not tokens and host not in LOOPBACK:
        raise Refused(
            403, f"the host is {host or 'missing'}; without tokens the service answers only 127.0.0.1 and localhost"
        )
    return host, port


def check_site(headers: Headers, *, tokens: bool) -> None:
    """Refuse pages of other sites that a browser here has open, even if their host name leads to this machine."""
    host, port = check_host(headers, tokens=tokens)
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    # A browser that sends no Sec-Fetch-Site is an old one: its pages of other ports are found by the port.
    if (site or "none") not in SAME or (origin is not None and not _fits(origin, host, port, exactly=site is None)):
        raise Refused(403, "the request comes from a page of another site; expected the service's own")


def _fits(origin: str, host: str, port: int | None, *, exactly: bool) -> bool:
    found = ORIGIN.fullmatch(origin)
    if found is None:  # such as "null", which sandboxed pages send
        return False
    default = PORTS.get(found[1].lower())
    name, number = _parse(found[2], "Origin")
    return name == host and (not exactly or (number or default) == (port or default))


def _parse(text: str, header: str) -> Place:
    found = HOST.fullmatch(text)
    if found is None:
        raise Refused(400, f"the header {header} is not a host name with an optional port; send it as browsers do")
    return (found[1] or found[2]).lower(), int(found[3]) if found[3] else None
