"""Which interpreter runs vLLM's own Triton kernels on a CPU: slot mappings, block tables, sampling.

Ours, and in a share of the cases Triton's, so that neither is trusted alone. A GPU runs the kernels as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..cases.case import Case
from .cpu_platform import has_cuda

# one case in so many runs in Triton's own interpreter, which takes several times as long
STOCK_SHARE = 24


class HelperKernels:
    """Which interpreter runs the Triton kernels of this process: ours from now on, but inside ``stock``.

    Our own kernels' accesses are audited elsewhere, so bounds are not checked here.
    """

    def __init__(self) -> None:
        self._ours = ExitStack()
        self._start()

    @contextmanager
    def of(self, case: Case) -> Iterator[None]:
        """The interpreter that a Case is played with, by its seed; both kinds of poison meet both of them."""
        if case.inputs.seed // 2 % STOCK_SHARE == STOCK_SHARE - 1:
            with self.stock():
                yield
        else:
            yield

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Inside the block Triton's own interpreter runs them."""
        self._ours.close()
        try:
            yield
        finally:
            self._start()

    def _start(self) -> None:
        if has_cuda():
            return
        from .interpreter import interpreted

        self._ours.enter_context(interpreted(bounds="off", traffic="off"))
