"""Engines that share a journal: sessions are taken over, moved and drained; no acknowledged turn is lost.

Real processes: engines, API processes and PostgreSQL.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.cluster.lives import LifeState
from tests.cluster.cutting import Proxy
from tests.databases import run_sql, shared_cluster, start_cluster
from tests.server.apart import Apart, states, until
from tests.server.serving import Server
from tests.server.shared import Shared, Talker, stored_turns, talk_all


@pytest.fixture
def three(apart: Apart) -> Shared:
    """Three engines and two API processes on one journal."""
    return Shared(apart)


def kill(shared: Shared, number: int) -> None:
    """Kill an engine and reap it."""
    engine = shared.engines[number]
    engine.process.kill()
    engine.process.wait(30)


def retried(ask: Callable[[], Any]) -> Any:
    """Ask until the answer is no error that may be retried."""
    return until(lambda: answer if (answer := ask()).status_code != 503 else None)


def engine_ids(server: Server, names: list[str]) -> dict[str, str]:
    return {name: str(server.state(name)["engine"]) for name in names}


def test_sessions_of_a_killed_engine_go_on_at_others(three: Shared) -> None:
    here, there = three.apis
    names = [here.open(f"s{number}", metadata={"n": number}) for number in range(6)]
    firsts = {name: here.say(name, "one", turn_id="t1") for name in names}
    homes = engine_ids(there, names)
    assert len(set(homes.values())) == 3, "they are spread"
    moved = next(name for name in names if homes[name] == "e0")
    first = firsts[moved]
    kill(three, 0)
    said = retried(
        lambda: there.post(f"/v1/sessions/{moved}/turns", {"input": "two", "turn_id": "t2"})
    ).json()
    assert said["text"] == "two"
    assert said["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"], "the history is there"
    again = here.say(moved, "one", turn_id="t1")
    assert (again["text"], again["usage"]) == ("one", first["usage"]), "the new owner knows the turn"
    state = here.state(moved)
    assert (state["turns"], state["metadata"]) == (2, {"n": names.index(moved)})
    assert state["engine"] != "e0"
    for name in names:
        assert here.say(name, "three")["text"] == "three"
    assert {state["engine"] for state in map(there.state, names)} == {"e1", "e2"}
    lives = dict(run_sql(three.url, "SELECT name, state FROM lives"))
    assert lives == {"e0": LifeState.DEAD, "e1": LifeState.LIVE, "e2": LifeState.LIVE}
    assert {len(turns) for turns in stored_turns(three.url).values()} == {2, 3}


def test_a_new_api_process_finds_sessions_that_nobody_serves(three: Shared) -> None:
    here = three.apis[0]
    name = here.open("alone", system="Be brief.")
    here.say(name, "one")
    kill(three, three.of(name))
    left = [engine for engine in three.engines if engine.process.poll() is None]
    fresh = three.apart.api(*left)
    assert retried(lambda: fresh.get(f"/v1/sessions/{name}")).json()["turns"] == 1
    assert fresh.say(name, "two")["text"] == "two"
    missing = fresh.get("/v1/sessions/nobody")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")
    taken = fresh.post("/v1/sessions", {"id": name})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "session_exists")


def test_requests_are_recognised_by_the_next_owner(three: Shared) -> None:
    here, there = three.apis
    name = here.open("parent")
    for number in range(3):
        here.say(name, f"word {number}")
    fork = {"id": "child", "at_turn": 2, "request_id": "f1"}
    assert here.post(f"/v1/sessions/{name}/fork", fork).status_code == 201
    rewind = {"to_turn": 1, "request_id": "r1"}
    assert here.post(f"/v1/sessions/{name}/rewind", rewind).status_code == 200
    there.say(name, "after")
    kill(three, three.of(name))
    # The parent goes to one engine; the fork is made to go to another.
    assert retried(lambda: there.post(f"/v1/sessions/{name}/rewind", rewind)).status_code == 200
    assert there.state(name)["turns"] == 2, "the rewind was not made again"
    parent = three.of(name)
    other = next(each for each in range(3) if each != parent and three.engines[each].process.poll() is None)
    lone = three.apart.api(three.engines[other])
    assert retried(lambda: lone.get("/v1/sessions/child")).json()["engine"] == f"e{other}"
    for api in (here, there):
        repeated = retried(lambda api=api: api.post(f"/v1/sessions/{name}/fork", fork)).json()
        assert (repeated["id"], repeated["turns"], repeated["engine"]) == ("child", 2, f"e{other}")
    assert there.http.delete("/v1/sessions/child").status_code == 200
    gone = retried(lambda: here.post(f"/v1/sessions/{name}/fork", fork))
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "request_conflict")


def test_one_name_opened_at_two_engines_at_once_is_one_session(apart: Apart) -> None:
    two = Shared(apart, engines=2, apis=0)
    apis = [apart.api(engine) for engine in two.engines]
    for number in range(5):
        answers: list[Any] = []
        at_once = threading.Barrier(2)

        def race(api: Server, name: str = f"name{number}", heard: list[Any] = answers) -> None:
            at_once.wait()  # noqa: B023
            heard.append(api.post("/v1/sessions", {"id": name}))

        racers = [threading.Thread(target=race, args=(api,)) for api in apis]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        assert sorted(answer.status_code for answer in answers) == [201, 409]
        refused = next(answer for answer in answers if answer.status_code == 409)
        assert refused.json()["error"]["code"] == "session_exists"
    # Each API process has one engine: a session of the other one's cannot be reached, and has not ended.
    homes = dict(run_sql(two.url, "SELECT s.id, l.name FROM sessions s JOIN lives l ON l.life = s.owner"))
    name, home = next(iter(homes.items()))
    other = apis[1 - int(home.removeprefix("e"))]
    assert other.get(f"/v1/sessions/{name.rpartition('/')[2]}").status_code == 503


def test_a_woken_engine_commits_nothing_and_takes_part_again(three: Shared) -> None:
    here, there = three.apis
    names = [here.open(f"s{number}") for number in range(6)]
    for name in names:
        here.say(name, "one")
    name = next(each for each in names if three.of(each) == 0)
    sleeper = three.engines[0]
    os.kill(sleeper.process.pid, signal.SIGSTOP)
    try:
        until(lambda: states(there).get("e0") == "down" and states(here).get("e0") == "down", 60)
        assert (
            retried(lambda: there.post(f"/v1/sessions/{name}/turns", {"input": "two"})).json()["text"]
            == "two"
        )
    finally:
        os.kill(sleeper.process.pid, signal.SIGCONT)
    sleeper.says("this server continues with a new life")
    assert here.say(name, "three")["text"] == "three"
    assert here.state(name)["turns"] == 3 and here.state(name)["engine"] != "e0"
    lives = run_sql(three.url, "SELECT state FROM lives WHERE name = 'e0' ORDER BY life")
    assert lives == [(LifeState.DEAD,), (LifeState.LIVE,)]
    three.apart.connected(here, 3)
    three.apart.connected(there, 3)
    for each in names:
        assert (
            retried(lambda each=each: there.post(f"/v1/sessions/{each}/turns", {"input": "x"})).status_code
            == 200
        )
    opened = [here.open(f"new{number}") for number in range(6)]
    assert "e0" in engine_ids(there, opened).values(), "it takes sessions again"


def test_an_engine_that_hangs_is_given_up_when_the_journal_has_not_heard_of_it(apart: Apart) -> None:
    """Long before its link counts as lost, for which an hour of silence is allowed here."""
    shared = Shared(apart, engines=2, apis=0)
    server = apart.api(*shared.engines, arguments=("--link-seconds", "3600"))
    shared.apis.append(server)
    names = [server.open(f"s{number}") for number in range(4)]
    for each in names:
        server.say(each, "one")
    name = next(each for each in names if shared.of(each) == 0)
    os.kill(shared.engines[0].process.pid, signal.SIGSTOP)
    try:
        said = until(
            lambda: (
                answer
                if (answer := server.post(f"/v1/sessions/{name}/turns", {"input": "two"})).status_code == 200
                else None
            )
        )
        assert said.json()["text"] == "two" and server.state(name)["engine"] == "e1"
        assert states(server) == {"e0": "down", "e1": "up"}
        assert any("neither this process nor the journal has heard of it" in line for line in server.lines)
    finally:
        os.kill(shared.engines[0].process.pid, signal.SIGCONT)
    apart.connected(server, 2)
    assert server.state(name)["turns"] == 2


def test_a_woken_engine_does_not_answer_with_an_old_state(apart: Apart) -> None:
    """It is asked before the journal has told it that it is dead, by an API process that knows no other."""
    database = shared_cluster()
    name = database.new_database()
    with Proxy(database.directory) as proxy:
        shared = Shared(apart, url=f"postgresql://holdfast@/{name}?host={proxy.directory}", engines=1, apis=0)
        shared.url = database.url(name)
        shared.engines.append(shared.engine())
        links = ("--link-seconds", "2")
        one, both = apart.api(shared.engines[0], arguments=links), apart.api(*shared.engines, arguments=links)
        session = one.open("s")
        one.say(session, "one")
        sleeper = shared.engines[0]
        os.kill(sleeper.process.pid, signal.SIGSTOP)
        try:
            until(lambda: states(both).get("e0") == "down" and states(one).get("e0") == "down", 60)
            said = retried(lambda: both.post(f"/v1/sessions/{session}/turns", {"input": "two"}))
            assert said.json()["text"] == "two"
            proxy.delay = 0.5
        finally:
            os.kill(sleeper.process.pid, signal.SIGCONT)
        apart.connected(one, 1)
        answers = [one.get(f"/v1/sessions/{session}") for _ in range(3)]
        assert {answer.status_code for answer in answers} == {503}, [answer.text for answer in answers]
        apart.connected(both, 2)
        assert both.state(session)["turns"] == 2
        proxy.delay = 0.0
        apart.end()


def test_a_tenants_limit_holds_over_all_engines(apart: Apart) -> None:
    two = Shared(apart, "--tenant-sessions", "3", engines=2)
    here, there = two.apis
    for number in range(3):
        (here, there)[number % 2].open(f"s{number}")
    for api in two.apis:
        refused = api.post("/v1/sessions", {"id": "s3"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
        forked = api.post("/v1/sessions/s0/fork", {"id": "s4"})
        assert (forked.status_code, forked.json()["error"]["code"]) == (429, "too_many_sessions")
    assert there.http.delete("/v1/sessions/s1").status_code == 200
    assert here.open("s5") == "s5"


def rounds(shared: Shared, count: int, disturb: Callable[[int], None], talkers: int = 8) -> None:
    """Let clients talk while something is disturbed, and count what they were told."""
    clients = [Talker(shared.apis, f"c{number}") for number in range(talkers)]
    for client in clients:
        client.open()
    for number in range(count):
        threads = talk_all(clients, 6, first=6 * number)
        disturb(number)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    for client in clients:
        assert len(client.acknowledged) == 6 * count
        client.check()
    stored = stored_turns(shared.url)
    assert {client.session: client.acknowledged for client in clients} == stored


def kill_and_restart(shared: Shared, number: int) -> None:
    """Kill an engine, and start it again at its address."""
    place = number % len(shared.engines)
    address = shared.engines[place].address
    kill(shared, place)
    shared.engines[place] = shared.engine(f"e{place}", address)


def test_engines_are_killed_under_load(three: Shared) -> None:
    rounds(three, 5, lambda number: kill_and_restart(three, number))


@pytest.mark.soak
def test_engines_are_killed_under_load_fifty_times(three: Shared) -> None:
    rounds(three, 50, lambda number: kill_and_restart(three, number))


def kill_api(shared: Shared, number: int) -> None:
    """Kill an API process; another is added."""
    victim = shared.apis[number % len(shared.apis)]
    victim.process.kill()
    victim.process.wait(30)


def test_an_api_process_is_killed_under_load(three: Shared) -> None:
    rounds(three, 1, lambda number: kill_api(three, number))


def stop_for_a_while(shared: Shared, number: int) -> None:
    """Stop an engine for longer than its links last, and let it go on."""
    place = number % len(shared.engines)
    engine = shared.engines[place]
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        until(lambda: all(states(api).get(f"e{place}") == "down" for api in shared.apis), 60)
        time.sleep(1.5)  # Its lease was not renewed for a second: its sessions may be taken over.
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)
    for api in shared.apis:
        shared.apart.connected(api, len(shared.engines))


def test_an_engine_is_stopped_under_load(three: Shared) -> None:
    rounds(three, 1, lambda number: stop_for_a_while(three, number))


@pytest.mark.soak
def test_engines_are_stopped_under_load_many_times(three: Shared) -> None:
    rounds(three, 15, lambda number: stop_for_a_while(three, number))


@pytest.mark.soak
def test_engines_are_stopped_while_clients_talk_on(three: Shared) -> None:
    """An engine that wakes has turns in flight, and is sent more before it knows that it is dead."""
    chance = random.Random(three.url)
    clients = [Talker(three.apis, f"c{number}") for number in range(8)]
    over = threading.Event()

    def talk(client: Talker) -> None:
        client.open()
        while not over.wait(0.1 * chance.random()):
            client.say(len(client.acknowledged))

    threads = [threading.Thread(target=talk, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for _ in range(20):
        engine = chance.choice(three.engines)
        os.kill(engine.process.pid, signal.SIGSTOP)
        time.sleep(chance.uniform(0.1, 4))
        os.kill(engine.process.pid, signal.SIGCONT)
        time.sleep(chance.random())
    over.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    for client in clients:
        client.check()
    assert {client.session: client.acknowledged for client in clients} == stored_turns(three.url)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["restarted", "killed"])
def test_the_database_is_away_under_load(apart: Apart, how: str) -> None:
    database = start_cluster()
    try:
        shared = Shared(apart, url=database.url(database.new_database()))

        def disturb(_: int) -> None:
            (database.stop if how == "restarted" else database.kill)()
            time.sleep(1.5)
            database.start()

        rounds(shared, 1, disturb)
        apart.end()
    finally:
        database.remove()


def test_an_engine_that_is_cut_off_from_the_journal_loses_its_sessions(apart: Apart) -> None:
    database = shared_cluster()
    name = database.new_database()
    with Proxy(database.directory) as proxy:
        shared = Shared(apart, url=database.url(name), engines=2, apis=0)
        beyond = f"postgresql://holdfast@/{name}?host={proxy.directory}"
        shared.url = beyond
        shared.engines.append(shared.engine())
        shared.url = database.url(name)
        api = apart.api(*shared.engines)
        shared.apis.append(api)
        names = [api.open(f"s{number}") for number in range(6)]
        for each in names:
            api.say(each, "one")
        cut = next(each for each in names if shared.of(each) == 2)
        proxy.part()
        shared.engines[2].says("the journal cannot be written")
        turn = {"input": "two", "turn_id": "t2"}
        assert retried(lambda: api.post(f"/v1/sessions/{cut}/turns", turn)).json()["text"] == "two"
        assert api.state(cut)["engine"] in ("e0", "e1") and api.state(cut)["turns"] == 2
        shared.engines[2].process.kill()
