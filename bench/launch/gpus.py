"""GPUs: what the driver says of them (NVML), and whether their memory is free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from bench.launch.processes import command_line

# A process on the GPU holds at least its context (hundreds of MB); less than this is the driver's own.
_TOLERANCE_BYTES = 200 * 2**20
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 0.25


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU.

    Attributes:
        used_bytes: None where the driver does not tell.
        command: empty where the process cannot be seen from here (another container).
    """

    pid: int
    used_bytes: int | None
    command: str

    def describe(self) -> str:
        memory = f" with {_gib(self.used_bytes)}" if self.used_bytes is not None else ""
        return f"pid {self.pid} ({self.command or 'not visible from here'}){memory}"


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment.

    Attributes:
        used_bytes: by processes; on old drivers also what the driver keeps for itself.
        processes: as far as the driver lists them; inside a container it may list none.
    """

    index: int
    name: str
    uuid: str
    driver: str
    total_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...]


class GpuUnreadableError(Exception):
    """The driver does not tell what a GPU holds (it is lost, or the driver is), in the driver library's words."""


class Gpus:
    """The GPUs that a server will see; none on a host without them, where all that is asked here has an easy answer.

    Attributes:
        why_none: why there is none, where that is known; empty where there is one.
    """

    def __init__(self, visible: str | None = None) -> None:
        """Open the driver library.

        Args:
            visible: as CUDA_VISIBLE_DEVICES: indices or UUIDs (or what one alone begins with), separated by commas, up
                to the first that names no device; None is all, empty is none. Indices are the driver's (PCI bus
                order), which CUDA shares where all cards are of one kind.
        """
        self._nvml: Any = None
        self._devices: list[Any] = []
        self.why_none = "none is visible" if visible is not None and not visible.strip() else ""
        if self.why_none:
            return
        try:
            import pynvml
        except ImportError as error:
            self.why_none = str(error)
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._devices = self._open(visible)
        except pynvml.NVMLError as error:
            self.why_none = str(error)
            self.close()

    def _open(self, visible: str | None) -> list[Any]:
        count = self._nvml.nvmlDeviceGetCount()
        if visible is None:
            return [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        devices: list[Any] = []
        for name in visible.split(","):
            device = self._named(name.strip(), count)
            if device is None:  # CUDA ends the list here too
                break
            devices.append(device)
        if not devices:
            self.why_none = f"CUDA_VISIBLE_DEVICES={visible} begins with none of the {count} GPUs of this host"
        return devices

    def _named(self, name: str, count: int) -> Any:
        """The device of this index, or the one whose UUID begins so (CUDA takes that, NVML only the whole one)."""
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name)) if int(name) < count else None
        if not name.startswith(("GPU-", "MIG-")):
            return None
        matching = [device for uuid, device in self._by_uuid(count) if uuid.startswith(name)]
        return matching[0] if len(matching) == 1 else None

    def _by_uuid(self, count: int) -> Iterator[tuple[str, Any]]:
        """All GPUs and the parts (MIG) that they are divided into."""
        for index in range(count):
            with contextlib.suppress(self._nvml.NVMLError):  # it is broken, or cannot be divided
                gpu = self._nvml.nvmlDeviceGetHandleByIndex(index)
                yield _text(self._nvml.nvmlDeviceGetUUID(gpu)), gpu
                for place in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
                    with contextlib.suppress(self._nvml.NVMLError):  # nothing is in this place
                        part = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)
                        yield _text(self._nvml.nvmlDeviceGetUUID(part)), part

    def __enter__(self) -> Gpus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._devices = None, []

    def __len__(self) -> int:
        return len(self._devices)

    def facts(self) -> tuple[Gpu, ...]:
        """What the driver says of each."""
        return tuple(self._facts(device) for device in self._devices)

    def used_bytes(self) -> tuple[int, ...]:
        """Memory in use, by GPU."""
        return tuple(int(self._memory(device).used) for device in self._devices)

    def idle_bytes(self) -> tuple[int, ...]:
        """Memory in use while nobody computes, by GPU: what is used now, less what computing processes hold.

        What only draws (a desktop) may stay. Where the driver lists nobody, all that is in use now counts as idle.
        """
        idle = []
        for device, used in zip(self._devices, self.used_bytes(), strict=True):
            held = [process.usedGpuMemory or 0 for process in self._computing(device) if process.pid != os.getpid()]
            idle.append(max(0, used - sum(size for size in held if size > _TOLERANCE_BYTES)))
        return tuple(idle)

    def occupants(self, baseline_bytes: tuple[int, ...], ours: Collection[int] = ()) -> tuple[str, ...]:
        """Who is on the GPUs beside us, in words: pid and command, else only how much memory is in use.

        Args:
            baseline_bytes: what ``used_bytes`` said when they were idle.
            ours: pids that are not meant.
        """
        found: list[str] = []
        for gpu, baseline in zip(self.facts(), baseline_bytes, strict=True):
            others = [process for process in gpu.processes if process.pid not in ours]
            excess = gpu.used_bytes - baseline
            if others:
                found += [f"GPU {gpu.index}: {process.describe()}" for process in others]
            elif excess > _TOLERANCE_BYTES:
                found.append(f"GPU {gpu.index}: {_gib(excess)} more in use than when it was idle, by processes unseen")
        return tuple(found)

    async def wait_free(self, baseline_bytes: tuple[int, ...], *, deadline_s: float) -> tuple[str, ...]:
        """Wait until no more memory is in use than when the GPUs were idle.

        Returns:
            empty once they are free (at once where there is none), else who is on them after ``deadline_s``.

        Raises:
            GpuUnreadableError: the driver does not tell.
        """
        end = time.monotonic() + deadline_s
        poll_s = _SHORTEST_POLL_S
        try:
            while self._is_more_in_use(baseline_bytes):
                if time.monotonic() >= end:
                    return self.occupants(baseline_bytes, ours={os.getpid()})
                await asyncio.sleep(poll_s)
                poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
        except self._nvml.NVMLError as error:
            raise GpuUnreadableError(str(error)) from error
        return ()

    def _is_more_in_use(self, baseline_bytes: tuple[int, ...]) -> bool:
        pairs = zip(self.used_bytes(), baseline_bytes, strict=True)
        return any(used > baseline + _TOLERANCE_BYTES for used, baseline in pairs)

    def _memory(self, device: Any) -> Any:
        try:  # this version leaves out what the driver keeps for itself, as nvidia-smi does
            return self._nvml.nvmlDeviceGetMemoryInfo(device, version=self._nvml.nvmlMemory_v2)
        except self._nvml.NVMLError:
            return self._nvml.nvmlDeviceGetMemoryInfo(device)

    def _facts(self, device: Any) -> Gpu:
        memory = self._memory(device)
        return Gpu(
            index=int(self._nvml.nvmlDeviceGetIndex(device)),
            name=_text(self._nvml.nvmlDeviceGetName(device)),
            uuid=_text(self._nvml.nvmlDeviceGetUUID(device)),
            driver=_text(self._nvml.nvmlSystemGetDriverVersion()),
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            processes=self._processes(device),
        )

    def _computing(self, device: Any) -> list[Any]:
        try:
            return list(self._nvml.nvmlDeviceGetComputeRunningProcesses(device))
        except self._nvml.NVMLError:
            return []  # some virtual GPUs do not tell

    def _processes(self, device: Any) -> tuple[GpuProcess, ...]:
        listed = self._computing(device)
        with contextlib.suppress(self._nvml.NVMLError):
            listed += self._nvml.nvmlDeviceGetGraphicsRunningProcesses(device)
        memory_by_pid = {int(process.pid): process.usedGpuMemory for process in listed}
        return tuple(
            GpuProcess(pid, None if used is None else int(used), command_line(pid))
            for pid, used in sorted(memory_by_pid.items())
        )


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
