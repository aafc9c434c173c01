"""Where a Ray cluster is, and one clear line when it is not there."""

from __future__ import annotations

import logging
import socket
import warnings
from typing import Any

from sharpmax.errors import reject

__all__ = ["connect"]

_ALLOWED = "host:port of a running Ray cluster that this machine belongs to, or 'auto'"
_TODO = "start one with: ray start --head --port 6379"
_PATIENCE_S = 30.0  # a refusal comes at once; a head with much to do answers late
_OBJECT_STORE_BYTES = 80_000_000  # what is more goes to disk
# How a client of HTTP/2, which Ray speaks, begins; the server answers with a frame of the same type.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4


def connect(ray: Any, address: str | None, workers: int | None) -> None:
    """Join the cluster at `address`, or start one of this machine: no dashboard, no logs, no statistics to anybody."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    own = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    if address is not None and address != "auto":
        _check(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray will change one day is not the user's to know
        try:
            ray.init(address=address or "local", **quiet, **({} if address else own))
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as problem:
            ray.shutdown()  # what has been started so far
            said = " ".join(str(problem).split())[:300]
            if address is None:
                reject("--engine", f"ray, which cannot be started here ({said})", "a machine that can run Ray")
            reject("--address", f"{address!r} ({said})", _ALLOWED, _TODO)


def _check(address: str) -> None:
    """Ask the cluster for a sign of life: Ray itself would ask for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        reject("--address", repr(address), _ALLOWED)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S) as line:
            line.settimeout(_PATIENCE_S)
            line.sendall(_HELLO)
            reply = line.recv(9)
    except OSError as problem:
        said = problem.strerror or str(problem) or type(problem).__name__
        reject("--address", f"{address!r}, where no cluster is ({said})", _ALLOWED, _TODO)
    if len(reply) < 4 or reply[3] != _SETTINGS:
        reject("--address", f"{address!r}, where something else than Ray is", _ALLOWED, _TODO)
