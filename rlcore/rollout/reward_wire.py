"""Between a rank and its reward processes: length-prefixed pickles over a socket, every wait bounded.

To the process: first `(TaskConfig, tokenizer path, seed)`, then `(Prompt, response ids)` one at a time,
`None` to leave. From the process: first `""` when it can grade or the reason why not, then one `(reward,
reason)` a response.
"""

from __future__ import annotations

import socket
import struct
import time

_LENGTH = struct.Struct("!Q")


def send_bytes(channel: socket.socket, payload: bytes, deadline: float | None = None) -> None:
    """Sends one message. `deadline`: on the clock of `time.monotonic`; None: waits forever.

    Raises `OSError` when the other end is gone, `TimeoutError` (one) when it does not read in time.
    """
    channel.settimeout(_seconds_left(deadline))
    channel.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_bytes(channel: socket.socket, deadline: float | None = None) -> bytes:
    """One message. Raises `EOFError` or `OSError` when the other end is gone, `TimeoutError` past the
    deadline.
    """
    (length,) = _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size, deadline))
    return _receive_exactly(channel, length, deadline)


def _receive_exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        channel.settimeout(_seconds_left(deadline))
        part = channel.recv(min(size - len(parts), _MOST_AT_ONCE))
        if not part:
            raise EOFError("the other end was closed")
        parts += part
    return bytes(parts)


# Bytes; a length that makes no sense must not become an allocation.
_MOST_AT_ONCE = 1 << 20
# Seconds. 0 would mean "do not wait at all": an answer that is there already still counts.
_SHORTEST = 0.001


def _seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), _SHORTEST)
