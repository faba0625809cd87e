"""No message vanishes between a client and the model, whatever the chat template knows of its role."""

from collections.abc import Sequence

import pytest

from holdfast.engine.text.chat_roles import SHAPE_MESSAGES_MAX, SHAPES_KEPT, Message, ShownRoles
from holdfast.engine.text.chat_template import ChatTemplate, ChatTemplateError

EVERY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
"""Shows every role."""

KNOWN = (
    "{% for m in messages %}"
    "{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content | trim }}{% endif %}"
    "{% endfor %}"
)
"""Passes over roles that it does not know."""

STRICT = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""Refuses roles that it does not know."""

FIRST = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
"""Shows a system message only where it is the first."""


def said(*pairs: str) -> list[Message]:
    """Messages written as role:text."""
    return [dict(zip(("role", "content"), pair.split(":"), strict=True)) for pair in pairs]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


@pytest.mark.parametrize("source", [KNOWN, STRICT, FIRST])
def test_a_developer_is_the_system_where_the_template_does_not_know_the_role(source: str) -> None:
    rendered = template(source).render(said("developer:rules", "user:hello"))
    assert rendered == template(source).render(said("system:rules", "user:hello"))
    assert "rules" in rendered


def test_a_developer_stays_one_where_the_template_shows_the_role() -> None:
    assert template(EVERY).render(said("developer:rules", "user:hi")) == "<developer>rules<user>hi"


@pytest.mark.parametrize(
    ("source", "messages", "lost"),
    [
        (KNOWN, said("user:a", "tool:b"), 1),
        (KNOWN, said("function:a", "user:b"), 0),
        (KNOWN, said("user:a", "developer:b", "tool:c", "user:d"), 2),
        (FIRST, said("user:a", "assistant:b", "system:c", "user:d"), 2),
        (FIRST, said("system:a", "developer:b", "user:c"), 1),
    ],
)
def test_a_message_that_the_template_skips_is_refused_with_its_place(
    source: str, messages: list[Message], lost: int
) -> None:
    with pytest.raises(ChatTemplateError, match=rf"^messages\[{lost}\]: .* skips a message") as refused:
        template(source).render(messages)
    assert str(messages[lost]["role"]) in str(refused.value)


def test_places_in_what_goes_on_count_from_its_own_first_message() -> None:
    assert template(FIRST).continuation(said("tool:4", "user:and?")) == "<tool>4<user>and?"
    with pytest.raises(ChatTemplateError, match=r"^messages\[1\]"):
        template(FIRST).continuation(said("user:a", "developer:b"))
    assert "rules" in template(KNOWN).continuation(said("developer:rules"))


def test_a_template_that_refuses_messages_says_why_itself() -> None:
    with pytest.raises(ChatTemplateError, match="unknown role"):
        template(STRICT).render(said("tool:b"))


def test_texts_are_not_looked_at() -> None:
    for text in ("", "  ", "0", "\ue0010\ue001"):
        assert template(KNOWN).render(said(f"user:{text}", f"assistant:{text}")).count("<") == 2


class Counted:
    """A template that counts how often it is rendered."""

    def __init__(self) -> None:
        self.renders = 0
        self.roles = ShownRoles(self.render)

    def render(self, messages: Sequence[Message]) -> str:
        self.renders += 1
        return "".join(str(message["content"]) for message in messages if message["role"] != "tool")


def test_an_order_of_roles_is_looked_at_once() -> None:
    counted = Counted()
    for _ in range(5):
        counted.roles.fitted(said("system:a", "user:b"))
        with pytest.raises(ChatTemplateError):
            counted.roles.fitted(said("user:b", "tool:c"))
    assert counted.renders == 2
    long = said(*["user:a"] * (SHAPE_MESSAGES_MAX + 1))
    for _ in range(3):
        counted.roles.fitted(long)
    assert counted.renders == 5, "those that are too long to be kept are rendered each time"


def test_as_many_orders_are_kept_as_there_is_room_for() -> None:
    counted = Counted()
    for number in range(SHAPES_KEPT + 10):
        roles = ["user" if number >> bit & 1 else "assistant" for bit in range(12)]
        counted.roles.fitted(said(*(f"{role}:a" for role in roles)))
        assert len(counted.roles._shapes) <= SHAPES_KEPT
    assert counted.renders == SHAPES_KEPT + 10
