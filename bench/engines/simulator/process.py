"""Process: how a simulated server ends, with the last words and exit codes of a real one."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from bench.engines.sglang.settings import GIB, MIB
from bench.engines.simulator.log import Log
from bench.experiment import HardwareSpec

# Of the card's memory, what torch never counts as its capacity (139.80 of 140.40 GiB on the H200).
NOT_TORCHS_BYTES = 0.6 * GIB


class Process:
    """This process.

    Attributes:
        serving: it has been ready, which changes what the main process says of a dead scheduler.
    """

    def __init__(self, log: Log, hardware: HardwareSpec) -> None:
        self.log = log
        self.hardware = hardware
        self.serving = False

    def refuse(self, message: str) -> NoReturn:
        """The command line was refused: a traceback, and exit code 1."""
        self.log.raw("Traceback (most recent call last):")
        self.log.raw('  File "sglang/launch_server.py", in <module>')
        self.log.raw("    server_args = prepare_server_args(sys.argv[1:])")
        self.log.raw('  File "sglang/srt/server_args.py", in prepare_server_args')
        self.log.raw(message)
        self.end(1)

    def run_out(self, message: str, free_bytes: float, *, capturing: bool = False) -> NoReturn:
        """GPU memory ran out: torch's message is completed, and a capture wraps it in advice."""
        if message.startswith("torch.OutOfMemoryError"):
            message += self._torch_details(free_bytes)
        self.die(self._capture_failed(message.partition(": ")[2]) if capturing else message)

    def die(self, message: str) -> NoReturn:
        """The scheduler ends with an exception, and takes everything with it: SIGKILL, as in SGLang."""
        self.log.scheduler_died(message, serving=self.serving)
        self.kill()

    def kill(self) -> NoReturn:
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(137)  # not reached

    def end(self, code: int) -> NoReturn:
        sys.stderr.flush()
        os._exit(code)

    def _torch_details(self, free_bytes: float) -> str:
        total = self.hardware.memory_bytes - NOT_TORCHS_BYTES
        left = max(0.0, free_bytes)
        shown = f"{left / GIB:.2f} GiB" if left >= GIB else f"{left / MIB:.2f} MiB"
        used = (total - left) / GIB
        return (
            f" GPU 0 has a total capacity of {total / GIB:.2f} GiB of which {shown} is free. Including non-PyTorch "
            f"memory, this process has {used:.2f} GiB memory in use. Of the allocated memory {used - 0.7:.2f} GiB is "
            "allocated by PyTorch, and 16.09 MiB is reserved by PyTorch but unallocated."
        )

    def _capture_failed(self, cause: str) -> str:
        lines = [
            f"Exception: Capture cuda graph failed: {cause}",
            "Possible solutions:",
            "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
        ]
        if self.log.version >= (0, 5, 14):
            lines += [
                "2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)",
                "3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled. (Not recommended. "
                "Huge performance loss)",
            ]
        else:
            lines += [
                "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)",
                "3. disable torch compile by not using --enable-torch-compile",
                "4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)",
            ]
        return "\n".join(lines)
