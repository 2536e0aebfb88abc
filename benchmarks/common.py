"""What the benchmarks share."""

from __future__ import annotations

import socket

__all__ = ["free_port", "verdict"]


def verdict(met: bool, figure: str) -> int:
    """Print whether the bar is met; the exit code."""
    print(f"{'met' if met else 'MISSED'}: {figure}")
    return 0 if met else 1


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
