"""A stream that its client does not read: what waits for it is joined, however long the turns speak."""

import asyncio
import json

from holdfast.engine.echo import echo_tokenizer
from holdfast.engine.sampling import Sampling
from holdfast.server.http.answers import turn_pieces
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed, spoken
from holdfast.server.routes.openai import ChunkForm
from holdfast.server.routes.openai_format import Completion

CHOICES, WORDS = 3, 200


def feeds(count: int) -> list[TurnFeed]:
    fields = wire.SamplingFields()
    return [
        TurnFeed(wire.StartTurn(call, f"t-{call}", "ann", [1], fields), lambda _feed: None)
        for call in range(count)
    ]


def end(feed: TurnFeed) -> wire.End:
    return wire.End(feed.call, "finished", "stop", "", [], 1, 0, 1, 0.0, 0.0, 0.0)


def speak(feed: TurnFeed, word: int) -> None:
    feed.push(wire.Delta(feed.call, word, f"{word} ", [word]))


def test_the_words_of_several_choices_wait_in_their_feeds_and_are_joined() -> None:
    async def main() -> None:
        turns = feeds(CHOICES)
        tokenizer = echo_tokenizer()
        completion = Completion("cmpl-1", "echo", "f", tokenizer, Sampling())
        form = ChunkForm(turns, completion, usage=True, choices=1)
        chunks = turn_pieces(None, turns, form)
        for turn in turns:
            speak(turn, 0)
        pieces = [await anext(chunks) for _ in turns]
        tasks = len(asyncio.all_tasks())
        # The client reads nothing while all choices go on to speak.
        for word in range(1, WORDS):
            for turn in turns:
                speak(turn, word)
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == tasks == 1, "nobody takes words that the client does not read"
        assert [len(turn._deltas) for turn in turns] == [WORDS - 1] * CHOICES
        for turn in turns:
            turn.finish(end(turn))
        pieces += [piece async for piece in chunks]
        totals, done, rest = form.closing().partition(b"data: [DONE]\n\n")
        assert done and not rest
        shown = [json.loads(piece.removeprefix(b"data: ")) for piece in [*pieces, totals]]
        texts: list[list[str]] = [[] for _ in turns]
        for piece in shown:
            for choice in piece["choices"]:
                if choice["finish_reason"] is None:
                    texts[choice["index"]].append(choice["text"])
        assert [len(said) for said in texts] == [2] * CHOICES, (
            "one piece when it was read, one for all the rest"
        )
        whole = "".join(f"{word} " for word in range(WORDS))
        assert ["".join(said) for said in texts] == [whole] * CHOICES
        assert shown[-1]["usage"]["prompt_tokens"] == CHOICES

    asyncio.run(main())


def test_every_turn_is_told_once_in_the_order_in_which_it_speaks_and_ends() -> None:
    async def main() -> None:
        turns = feeds(CHOICES)
        heard: list[tuple[int, str | None]] = []

        async def listen() -> None:
            async for place, delta in spoken(turns):
                heard.append((place, None if delta is None else delta.text))

        listening = asyncio.create_task(listen())
        for place in (2, 0, 0, 1, 2):
            speak(turns[place], place)
            while not heard or heard[-1] != (place, f"{place} "):
                await asyncio.sleep(0)
            if (place, None) not in heard and place == 1:
                turns[place].finish(end(turns[place]))
        for place in (2, 0):
            speak(turns[place], 9)
            turns[place].finish(end(turns[place]))
        await listening
        for place in range(CHOICES):
            said = [text for where, text in heard if where == place]
            assert said.count(None) == 1 and said[-1] is None
        assert [text for where, text in heard if where == 2] == ["2 ", "2 ", "9 ", None]

    asyncio.run(main())
