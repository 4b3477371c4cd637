"""Messages of a conversation, as OpenAI's chat format and chat templates have them."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Message", "ToolCall"]


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any] | str
    """A text where what the policy wrote is no JSON object."""
    id: str = ""


@dataclass(frozen=True)
class Message:
    """What one side says."""

    role: str
    """system, developer, user, assistant or tool."""
    content: str | None = ""
    """None beside tool calls: templates tell a call from a text by it."""
    reasoning: str = ""
    """What the assistant thinks before it speaks; templates know it as `reasoning_content`."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """The call that a tool answers."""
    name: str = ""
    learn: bool = True
    """False for an assistant's message that is only context, `"weight": 0` in the file."""

    def plain(self) -> dict[str, Any]:
        """As templates read it; what is empty is left out, except the content."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.tool_calls
        ]
        optional = {
            "reasoning_content": self.reasoning,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        return {"role": self.role, "content": self.content} | {key: value for key, value in optional.items() if value}
