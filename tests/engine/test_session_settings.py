"""Settings of sessions: they are checked, journaled, inherited by forks, and told to the core."""

import math
from pathlib import Path

import pytest

from holdfast.core.errors import UnknownSession
from holdfast.core.retention import Retention
from holdfast.engine.engine import Engine
from holdfast.engine.session_settings import DEFAULT_SETTINGS, BadSetting, SessionSettings, check_change
from tests.engine.conftest import Make
from tests.engine.tiny import greedy


def retention(engine: Engine, name: str) -> Retention:
    return engine.loop.scheduler.registry.find(name).retention


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttl", 0),
        ("ttl", -1.0),
        ("ttl", math.nan),
        ("ttl", True),
        ("ttl", "60"),
        ("pin", 1),
        ("keep_reasoning", None),
        ("priority", 5),
        ("priority", -5),
        ("priority", 1.0),
        ("priority", True),
        ("colour", "red"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(BadSetting, match=name) as caught:
        check_change({name: value})
    assert caught.value.param == name


def test_settings_are_written_as_what_differs_from_the_defaults() -> None:
    assert DEFAULT_SETTINGS.written() == "{}"
    settings = SessionSettings(pin=True, priority=-2, keep_reasoning=False)
    assert SessionSettings.read(settings.written()) == settings
    assert SessionSettings.read('{"pin": true, "priority": 99, "later": [1]}') == SessionSettings(pin=True)


def test_a_session_is_kept_as_it_was_opened_and_changed(engine: Engine) -> None:
    with engine.session(id="a", ttl=50.0, pin=True, priority=2) as session:
        assert retention(engine, "a") == Retention(50.0, True, 2)
        session.update(priority=-1)
        assert retention(engine, "a") == Retention(50.0, True, -1), "what was left out stays"
        session.update(ttl=None, pin=False)
        assert retention(engine, "a") == Retention(engine.options.session_ttl, False, -1)
        with session.fork() as child:
            assert retention(engine, child.id) == retention(engine, "a")
    with pytest.raises(BadSetting):
        engine.session(id="b", priority=7)
    with pytest.raises(BadSetting):
        engine.session(id="b", ttl=-1)
    assert engine.sessions() == []
    with pytest.raises(UnknownSession):
        session.update(pin=True)


def test_turns_have_the_priority_of_their_session(engine: Engine) -> None:
    with engine.session(priority=3) as session:
        turn = session.say("the river", greedy(2)).wait()
        assert turn._turn.request.priority == 3


def test_settings_survive_the_process(make: Make, tmp_path: Path) -> None:
    journal = str(tmp_path / "sessions.journal")
    engine = make(journal=journal)
    first = engine.session(id="a", ttl=500.0, pin=True)
    first.say("the river", greedy(2)).wait()
    first.fork()
    first.update(priority=4, keep_reasoning=False)
    engine.session(id="plain")
    engine.close()
    again = make(journal=journal)
    assert retention(again, "a") == Retention(500.0, True, 4)
    assert again.loop.session_log.sessions["a"].settings == SessionSettings(True, 4, False)
    assert retention(again, "plain") == Retention(again.options.session_ttl)
    (child,) = set(again.sessions()) - {"a", "plain"}
    assert retention(again, child) == Retention(500.0, True, 0), "as its parent was when it was forked"
