"""Looking into training: what activations are like by layer, and what memory they take.

:func:`profile` watches any training loop; :class:`Profile` is what it has found out, in memory or
in a file; ``bitsparse report`` draws it.
"""

from __future__ import annotations

from bitsparse.profiling.profiler import Profiler, profile
from bitsparse.profiling.results import Profile, load

__all__ = ["Profile", "Profiler", "load", "profile"]
