"""Waiting for a prefix that another turn computes: only where that saves work."""

import pytest

from tests.core.driver import Driver, prompt


@pytest.mark.parametrize("dropped", [False, True])
def test_a_turn_with_a_history_waits_for_nobody_who_computes_the_same(dropped: bool) -> None:
    driver = Driver("dense", 4, chunk_tokens=4)
    session = driver.open("a")
    driver.turn("a", 9, 3)
    if dropped:
        driver.registry.drop_memory(session)
        driver.registry.tree.flush()
    driver.request((*driver.tokens("a"), *prompt(20, 5), 1, 2), 2)
    driver.step()
    turn = driver.submit("a", prompt(20, 5), 2)
    driver.step()
    assert turn.admitted is not None
    driver.run()


def test_what_a_turn_has_published_already_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("dense", 4)
    driver.request(prompt(21), 30)
    driver.step()
    driver.step()
    compared: list[int] = []
    monkeypatch.setattr(
        "holdfast.core.prompts.shared_pages",
        lambda _left, _right, limit, _page_bytes: [compared.append(limit), 0][1],
    )
    driver.request((*prompt(20), 1, 2, 3), 2)
    driver.step()
    assert compared == []
    driver.request(prompt(90, 3), 2)
    driver.request(prompt(90, 4), 2)
    driver.step()
    assert compared == [22], "the last one, with the one before it"
    driver.run()
