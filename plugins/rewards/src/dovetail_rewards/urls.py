"""Removes secrets from URLs, for messages in logs, samples and reports."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_secrets(url: str) -> str:
    """Return the address without user, password and query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
