"""Formats of strings that are enforced, as regular expressions.

Owns the table. A format that is not in it says nothing, which is what JSON Schema makes of every format. Each pattern
is narrower than its standard where that keeps it short: years are 1000 to 2999, addresses have no exotic parts.
"""

from __future__ import annotations

_DAY_31 = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_DAY_30 = r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY_28 = r"02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"[12][0-9]{{3}}-(?:{_DAY_31}|{_DAY_30}|{_DAY_28})"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_TIME = rf"{_CLOCK}(?:Z|[+-](?:0[0-9]|1[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,5}}"
_DOMAIN = rf"(?:{_LABEL}\.){{1,4}}[a-z]{{2,10}}"
_LINK = rf"https?://{_DOMAIN}(?:/[A-Za-z0-9._~%-]*)*(?:\?[A-Za-z0-9._~=&%-]*)?(?:#[A-Za-z0-9._~-]*)?"
_HEX = "[0-9a-fA-F]"

FORMATS = {
    name: f"^{pattern}$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": rf"{_DATE}T{_TIME}",
        "duration": r"P(?:[0-9]{1,3}W|[0-9]{1,3}D(?:T[0-9]{1,3}H)?|T[0-9]{1,3}[HMS]|[0-9]{1,3}[YM])",
        "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
        "email": rf"[A-Za-z0-9_](?:[A-Za-z0-9_+-]|\.[A-Za-z0-9_+-]){{0,30}}@{_DOMAIN}",
        "hostname": _HOST,
        "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
        "ipv6": rf"{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{7}}",
        "uri": _LINK,
    }.items()
}
