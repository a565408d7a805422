"""The APIs that the gateway speaks: each reads a request into a `ModelCall`, and writes answers, events and errors in its own form."""
