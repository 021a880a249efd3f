"""The engine: tokens in, tokens out, many requests in one forward pass.

Begin reading at `loop.Loop.tick`. Knows no text, no JSON and no asyncio; the layers above bring those.
"""

from kvasir.engine.engine import Engine
from kvasir.engine.events import Admitted, Diverged, Ended, EngineStats, FirstToken, Pressure, Queued, Ticked
from kvasir.engine.offers import Binding
from kvasir.engine.plan import Budget, Plan, PlannedRow, SeqView, Strategy, View
from kvasir.engine.request import Done, Event, Failed, Request, RequestId, Sink, Tokens
from kvasir.engine.settings import EngineSettings

__all__ = [
    "Admitted", "Binding", "Budget", "Diverged", "Done", "Ended", "Engine", "EngineSettings", "EngineStats", "Event",
    "Failed", "FirstToken", "Plan", "PlannedRow", "Pressure", "Queued", "Request", "RequestId", "SeqView", "Sink",
    "Strategy", "Ticked", "Tokens", "View",
]  # fmt: skip
