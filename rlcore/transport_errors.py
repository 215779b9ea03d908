"""How torch's transports (gloo, nccl, its store) say that a peer is late, or gone. Their errors have no class
in common, so the text decides.
"""

from __future__ import annotations

import re

_TIMEOUT = re.compile(r"timed out|timeout|DEADLINE_EXCEEDED", re.IGNORECASE)
_CONNECTION = re.compile(
    r"connection (was |is )?(likely )?(closed|reset|refused|aborted)|connectFullMesh|broken pipe|read error"
    r"|write error|remote process exited|got 0 bytes|socket",
    re.IGNORECASE,
)
_TRANSPORT = re.compile(r"^(Dist\w*|Collective)Error: |^\w+: .*(gloo|nccl|tcpstore)", re.IGNORECASE)


def is_transport_error(text: str) -> bool:
    """Whether an error (`Class: message`) is what this rank saw of another one that is late or gone."""
    return is_late(text) or is_gone(text)


def is_late(text: str) -> bool:
    """A peer did not come in time."""
    return bool(_TRANSPORT.search(text) and _TIMEOUT.search(text))


def is_gone(text: str) -> bool:
    """A peer ended."""
    return bool(_TRANSPORT.search(text) and not _TIMEOUT.search(text) and _CONNECTION.search(text))
