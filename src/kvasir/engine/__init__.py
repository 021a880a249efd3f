"""The engine: tokens in, tokens out, many requests in one forward pass.

Begin reading at `loop.Loop.tick`. Knows no text, no JSON and no asyncio; the layers above bring those.
"""

from kvasir.engine.engine import Engine
from kvasir.engine.events import EngineStats
from kvasir.engine.plan import Budget, Plan, PlannedRow, SeqView, Strategy, View
from kvasir.engine.request import Done, Event, Failed, Request, RequestId, Sink, Tokens
from kvasir.engine.settings import EngineSettings
from kvasir.engine.warm import Binding

__all__ = [
    "Binding", "Budget", "Done", "Engine", "EngineSettings", "EngineStats", "Event", "Failed", "Plan", "PlannedRow",
    "Request", "RequestId", "SeqView", "Sink", "Strategy", "Tokens", "View",
]  # fmt: skip
