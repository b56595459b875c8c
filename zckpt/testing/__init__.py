"""What projects that build on zckpt can test with, and what its own tests use."""

from zckpt.testing.ranks import RanksError, run_ranks

__all__ = ["RanksError", "run_ranks"]
