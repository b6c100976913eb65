"""Owns chat messages: the text-only subset of OpenAI's that is understood, and nothing silently dropped."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.errors import UnsupportedParameter

from services.router.core.fields import describe, read_list, read_object, read_text, refuse

# No conversation of people or agents is longer; each costs work in the template.
MESSAGES_MAX = 4096

# "developer" is OpenAI's newer name of the system role; templates of open models know only the older one.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

# Fields of a message that open models have no use for here; with a value they would change what was meant.
_UNSUPPORTED_FIELDS = ("tool_calls", "function_call", "audio", "refusal", "reasoning_content")
_UNSUPPORTED_PARTS = ("image_url", "input_audio", "file", "refusal", "video_url")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message, as the chat template gets it."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, str]:
        """The dict that chat templates are written for."""
        fields = {
            "role": self.role,
            "content": self.content,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
        }
        return {key: value for key, value in fields.items() if value is not None}


def read_messages(value: object, field: str = "messages") -> tuple[ChatMessage, ...]:
    """The conversation; raises InvalidRequest or UnsupportedParameter naming the message and field that is wrong."""
    messages = read_list(value, field)
    if not messages:
        refuse(field, "must hold at least one message")
    if len(messages) > MESSAGES_MAX:
        refuse(field, f"holds {len(messages)} messages; at most {MESSAGES_MAX} are allowed")
    return tuple(_read_message(message, f"{field}[{index}]") for index, message in enumerate(messages))


def _read_message(value: object, field: str) -> ChatMessage:
    message = read_object(value, field)
    for name, given in message.items():
        if name in _UNSUPPORTED_FIELDS and given not in (None, []):
            raise UnsupportedParameter(field=f"{field}.{name}")
        if name not in ("role", "content", "name", "tool_call_id", *_UNSUPPORTED_FIELDS):
            refuse(f"{field}.{name}", "no message has such a field")
    role = read_text(message.get("role"), f"{field}.role")
    if role not in ROLES:
        refuse(f"{field}.role", f"must be one of {', '.join(ROLES)}, not {role[:32]!r}")
    return ChatMessage(
        role=ROLES[role],
        content=_read_content(message.get("content"), f"{field}.content"),
        name=_read_optional_text(message.get("name"), f"{field}.name"),
        tool_call_id=_read_optional_text(message.get("tool_call_id"), f"{field}.tool_call_id"),
    )


def _read_content(value: object, field: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(field, f"must be a string or an array of text parts, not {describe(value)}")
    return "".join(_read_part(part, f"{field}[{index}]") for index, part in enumerate(value))


def _read_part(value: object, field: str) -> str:
    part = read_object(value, field)
    kind = read_text(part.get("type"), f"{field}.type")
    if kind in _UNSUPPORTED_PARTS:
        raise UnsupportedParameter(field=f"{field}.type", reason=f" as {kind!r}: only text parts are")
    if kind != "text":
        refuse(f"{field}.type", f"must be 'text', not {kind[:32]!r}")
    for name in part:
        if name not in ("type", "text"):
            refuse(f"{field}.{name}", "a text part has no such field")
    return read_text(part.get("text"), f"{field}.text")


def _read_optional_text(value: object, field: str) -> str | None:
    return None if value is None else read_text(value, field)
