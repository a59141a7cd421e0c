from dataclasses import dataclass


@dataclass
class FakeClock:
    """A clock that moves only when told. `wall_offset_s` sets it off from the monotonic one."""

    now_s: float = 0.0
    wall_offset_s: float = 1_000_000.0

    def time(self) -> float:
        return self.now_s + self.wall_offset_s

    def monotonic(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
