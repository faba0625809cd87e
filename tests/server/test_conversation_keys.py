"""Keys of conversations: what a request and the one before it have in common."""

from typing import Any

from holdfast.engine.portions import finish
from holdfast.server.conversation_keys import KEY_CHARACTERS, PORTION, Keys
from holdfast.server.conversation_keys import keys_of as keys_in_portions

Message = dict[str, Any]


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def keys_of(*given: Any, **named: Any) -> Keys:
    return finish(keys_in_portions(*given, **named))


FIRST = [said("system", "x"), said("user", "one")]
LATER = [*FIRST, said("assistant", "eins"), said("user", "two")]


def finds(before: list[Message], after: list[Message], **more: Any) -> bool:
    """Whether a request is compared with the session of the one before it."""
    about = {"tenant": "ann", "tools": [], "kwargs": {}}
    noted = keys_of(messages=before, **about).note
    return not set(noted).isdisjoint(keys_of(messages=after, **{**about, **more}).look_up)


def test_a_request_finds_the_one_that_it_extends() -> None:
    assert finds(FIRST, LATER) and finds(FIRST, FIRST)
    assert keys_of("ann", LATER, [], {}).look_up[-2] == keys_of("ann", FIRST, [], {}).note[-1], "next to last"
    edited = [*FIRST, said("assistant", "uno"), said("user", "two")]
    assert finds(LATER, edited), "answers do not count"


def test_notes_may_move() -> None:
    start = "s" * KEY_CHARACTERS
    noted = [said("system", "x"), said("user", f"{start} note")]
    assert finds(noted, [said("system", "x"), said("user", start), said("assistant", "a"), said("user", "b")])
    at_start = [said("system", "x"), said("user", "note: one")]
    assert finds(at_start, LATER), "by the messages before it"


def test_others_are_not_found() -> None:
    assert not finds(FIRST, LATER, tenant="bob")
    assert not finds(FIRST, LATER, tools=[{"type": "function"}])
    assert not finds(FIRST, LATER, kwargs={"enable_thinking": False})
    assert not finds(FIRST, [said("system", "y"), *LATER[1:]])
    assert not finds([said("user", "on"), said("user", "e")], [said("user", "o"), said("user", "ne")])
    assert not finds([said("user", "one")], [said("tool", "one")])


def test_any_request_has_keys() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert keys_of("ann", FIRST, deep, {}).note
    assert keys_of("ann", [said("assistant", "x")], [], {}).note
    assert keys_of("ann", [said("user", "\ud800"), {"role": "assistant"}], [], {}).look_up


def test_the_keys_of_many_messages_are_made_in_portions() -> None:
    messages = [said("user", str(number)) for number in range(10 * PORTION)]
    assert len(list(keys_in_portions("ann", messages, [], {}))) == 2 * 10, "by their beginnings, and whole"
    assert len(keys_of("ann", messages, [], {}).look_up) == 2 * len(messages)
