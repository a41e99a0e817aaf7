"""What bounds a kernel: computation, memory or communication, and the least time that it takes."""

from xform._devices import DTYPES, Device, device
from xform._hlo import Kernel, Program


def bound(kernel: Kernel, on: Device | None, sent: int = 0) -> tuple[str, float]:
    """Returns what bounds a kernel, "compute", "memory", "communication" or "host", and seconds.

    Where the device, or its peak for what is multiplied, is not known, the kind of the kernel
    decides, and the time is 0.
    """
    if kernel.kind == "host":
        return "host", 0.0
    if kernel.kind == "collective":
        return "communication", sent / on.network if on else 0.0
    dtype = DTYPES.get(kernel.factor, kernel.factor)
    if on is None or (kernel.factor and dtype not in on.peak):
        return ("compute" if kernel.kind in ("matmul", "library") else "memory"), 0.0
    work = kernel.work
    products = on.seconds({dtype: float(work.matrix)}) if work.matrix else 0.0
    others = (work.other + work.transcendental) / on.peak["float32@highest"]
    compute, memory = products + others, kernel.bytes / on.bandwidth
    # Nobody can tell of a library's kernel what it computes; they are written where that is much.
    if compute >= memory or kernel.kind == "library":
        return "compute", compute
    return "memory", memory


def known_device(program: Program) -> Device | None:
    """Returns what the device of a program can do at best; None where that is not known."""
    try:
        return device(program.device)
    except ValueError:
        return None
