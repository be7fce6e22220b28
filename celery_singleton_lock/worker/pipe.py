"""A pipe to one thread of this process, from its other threads and from processes that it starts."""

from __future__ import annotations

import os
from weakref import finalize


class Pipe:
    """Never waits. Closed when nobody has it any more: the number of a closed descriptor may be reused, and be written
    to.

    Attributes:
        descriptor: the descriptor to watch; readable from a write on, until what was written is read.
        writer: where to write.
    """

    def __init__(self) -> None:
        self.descriptor, self.writer = os.pipe()
        for each in self.descriptor, self.writer:
            os.set_blocking(each, False)
            finalize(self, os.close, each).atexit = False
