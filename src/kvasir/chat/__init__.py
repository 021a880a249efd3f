"""Chat: messages to text and text to events, through llama.cpp's templates and parsers. Knows no engine."""

from kvasir.chat.events import (
    ChatReply,
    ChatUsage,
    Done,
    Event,
    Evicted,
    Reasoning,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallDone,
    ToolCallStarted,
)
from kvasir.chat.tools import Tool

__all__ = [
    "ChatReply",
    "ChatUsage",
    "Done",
    "Event",
    "Evicted",
    "Reasoning",
    "Text",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallDone",
    "ToolCallStarted",
]
