"""Open engines by what they were opened with, so that cases of unlike settings do not close each other's engines."""

from __future__ import annotations

from .engine_process import EngineProcess
from .engine_trace import EngineConfig

# engines that stay open: a forked one holds some 200 MB of its own
MOST_ENGINES = 16


class EnginePool:
    """Engines with one fault planted or none; the one used least lately is closed where ``most`` are open."""

    def __init__(self, fault: str | None = None, most: int = MOST_ENGINES) -> None:
        self.fault, self.most = fault, most
        # the one used last comes last; a list, because engine arguments need not be hashable
        self.engines: list[EngineProcess] = []

    def engine(self, config: EngineConfig) -> EngineProcess:
        """The engine with these settings; its process starts with the first Case it plays."""
        engine = next((engine for engine in self.engines if engine.config == config), None)
        if engine is not None:
            self.engines.remove(engine)
        else:
            while len(self.engines) >= self.most:
                self.engines.pop(0).close()
            engine = EngineProcess(config, fault=self.fault)
        self.engines.append(engine)
        return engine

    @property
    def latest(self) -> EngineProcess:
        """The engine that was asked for last. Raises LookupError before the first one."""
        return self.engines[-1]

    def close(self) -> None:
        """End every engine process; the pool can be used again."""
        while self.engines:
            self.engines.pop().close()
