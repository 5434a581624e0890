"""Step times and peak memory, as each kind of device can tell them."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Peak:
    """
    Bytes. On a GPU: allocated and reserved by the caching allocator since the warm-up. On a CPU
    only the process's largest resident size ever is known: never mix the two.
    """

    allocated: int | None = None
    reserved: int | None = None
    host_rss: int | None = None


class Meter(Protocol):
    def begin(self) -> None:
        """A step begins."""

    def end(self) -> None:
        """The step has been issued."""

    def restart(self) -> None:
        """Warm-up is over: forget its times and its peak memory."""

    def seconds(self) -> list[float]: ...

    def peak(self) -> Peak: ...


def meter(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


@dataclass(slots=True)
class CpuMeter:
    started: float = 0.0
    times: list[float] = field(default_factory=list)

    def begin(self) -> None:
        self.started = time.perf_counter()

    def end(self) -> None:
        self.times.append(time.perf_counter() - self.started)

    def restart(self) -> None:
        self.times.clear()

    def seconds(self) -> list[float]:
        return self.times

    def peak(self) -> Peak:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Peak(host_rss=kib * 1024)


@dataclass(slots=True)
class CudaMeter:
    """Events in the stream: the host is never made to wait between steps."""

    device: torch.device
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def begin(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self.events.append((begin, end))

    def end(self) -> None:
        self.events[-1][1].record()

    def restart(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.events.clear()

    def seconds(self) -> list[float]:
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1000 for begin, end in self.events]

    def peak(self) -> Peak:
        allocated = torch.cuda.max_memory_allocated(self.device)
        return Peak(allocated=allocated, reserved=torch.cuda.max_memory_reserved(self.device))
