"""Random streams: the seed of a draw is derived from the run's seed and a name for its purpose, so that batching and order don't matter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import attrs


def stream_seed(seed: int, *name: str | int) -> int:
    """Return a seed of 63 bits for a generator, from BLAKE2b over the run's seed and the stream's name."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *name))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(seed: int, *name: str | int) -> None:
    """Seed torch's default CPU generator from a stream's name, for code that draws without its own generator.

    Generators of accelerators stay as they are: `torch.manual_seed` would seed them too. Without torch, the call does nothing.
    """
    if find_spec("torch") is not None:
        import torch

        torch.default_generator.manual_seed(stream_seed(seed, "torch", "process", *name))


@contextmanager
def torch_seeded(seed: int, *name: str | int) -> Iterator[None]:
    """Seed torch's default CPU generator within the block, as `seed_torch` does, and restore the generator's state afterwards."""
    if find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_rng_state()
    seed_torch(seed, *name)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@attrs.frozen(kw_only=True)
class SampleStream:
    """The name of the random stream for one turn of a sample, and the token offset at which a request begins to draw from the stream."""

    seed: int
    """The run's seed."""
    purpose: str = "train"
    """Purpose of the sample: `train`, `validation`, `baseline`, …"""
    epoch: int = 0
    prompt: int = 0
    """Index of the prompt's row in the dataset."""
    sample: int = 0
    """Index of the sample among the prompt's samples."""
    attempt: int = 0
    turn: int = 0
    fork: str = ""
    """The path of a forked sequence of an episode: `0.2` is the third fork of the first fork. Turns are counted within the sequence."""
    offset: int = 0
    """Token offset at which this request begins: 0, or the number of tokens kept from an aborted request."""

    def key(self) -> tuple[int, int]:
        """Return the stream's 128-bit key as two signed 64-bit integers: BLAKE2b of all fields but `offset`."""
        name = (
            f"{self.seed}/{self.purpose}/{self.epoch}/{self.prompt}/"
            f"{self.sample}/{self.attempt}/{self.turn}"
        )
        name += f"/{self.fork}" if self.fork else ""
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        return (
            int.from_bytes(digest[:8], "little", signed=True),
            int.from_bytes(digest[8:], "little", signed=True),
        )
