"""What a benchmark says while it runs, and what it leaves."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

Config = TypeVar("Config")
Case = TypeVar("Case")


@dataclass(frozen=True)
class Progress:
    """Told after each part of the work."""

    what: str
    """The part, or the case and what is being done."""
    done: int
    total: int


@dataclass
class Result(Generic[Config, Case]):
    """All that was measured. ``Config`` and ``Case`` are dataclasses."""

    benchmark: ClassVar[str]
    """Its name, by which readers of the file tell it from others."""

    config: Config
    environment: dict[str, Any]
    cases: list[Case] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Cases that were not measured, since the time limit would have been passed."""

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        config: Any = self.config
        cases: list[Any] = self.cases
        return {
            "benchmark": self.benchmark,
            "environment": self.environment,
            "config": asdict(config),
            "cases": [asdict(case) for case in cases],
            "skipped": self.skipped,
        }
