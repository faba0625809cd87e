"""Prefixes are computed once: counted in tokens that went through the model."""

from tests.parity.families import every, overlapped
from tests.parity.subject import Subject, Watched, greedy, prompt

PREFIX = 512
REQUESTS = 8


@overlapped(6)
def test_eight_requests_share_a_prefix(subject: Subject, overlap: bool) -> None:
    """All at once: the first computes the prefix, the others wait for it, whatever the layout."""
    shared = prompt(PREFIX, 50)
    prompts = [shared + prompt(9 + number, 60 + number) for number in range(REQUESTS)]
    with Watched(subject, overlap=overlap) as watched:
        turns = watched.engine.generate(prompts, greedy(8))
        for turn, before in zip(turns, prompts, strict=True):
            watched.check(turn, before)
        own = sum(len(before) - PREFIX + 8 for before in prompts)
        assert PREFIX + own - REQUESTS <= watched.computed <= PREFIX + own
        assert sorted(turn.usage.cached_tokens for turn in turns) == [0] + [PREFIX] * (REQUESTS - 1)


@every
def test_a_session_leaves_its_history_to_the_next(subject: Subject) -> None:
    """The same conversation again, after it was closed, resumes at its end."""
    with Watched(subject) as watched:
        with watched.engine.session() as session:
            transcript = watched.check(session.say(prompt(40, 1), greedy(8)), prompt(40, 1))
            watched.rest()
        before = watched.computed
        with watched.engine.session() as session:
            again = transcript + prompt(3, 2)
            turn = session.say(again, greedy(8))
            watched.check(turn, again)
            assert turn.usage.cached_tokens == len(transcript)
        assert watched.computed - before <= 3 + 8
