"""The text process: renders chat templates, tokenises, and reads large bodies, away from the event loop.

Tokenising and parsing JSON hold the GIL, and a template is untrusted code, so they run in a process of their
own. RLIMIT_AS limits its memory, an alarm limits rendering, and the API process kills it when a job exceeds
its time limit; RLIMIT_CPU ends it if the API process is gone. It exits at the end of its input.
Run as `python -m holdfast.server.text.process` by `lanes`.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # A terminal sends it to the whole process group, also while the imports below take their seconds.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from holdfast.core.tokens import unpack
from holdfast.engine.answer_builder import AnswerBuilder, AnswerRefused
from holdfast.engine.text.chat_template import ChatTemplateError, PromptEnd
from holdfast.engine.text.tokenizer import RenderedChat, Tokenizer, TooManyTokens, read_encoder
from holdfast.engine.tools.choose import Chosen
from holdfast.engine.tools.events import Call, Outcome
from holdfast.engine.tools.request import Mode, ToolsRefused
from holdfast.server.link import wire
from holdfast.server.text import jobs
from holdfast.server.text.answer_writer import CODES, read_asked_tools, written
from holdfast.server.text.histories import Histories, HistoryDiffers
from holdfast.server.text.trails import Match, find, places_in, stretch_of

_PLACE = re.compile(r"^messages\[([0-9]+)\]")
NAME_CHARACTERS_MAX = 64
NESTING = (dict, list)
"""Types of JSON values that hold others."""
"""Field names are truncated to this length in messages."""

__all__ = ["TextWorker", "tokenizer_of"]


class RenderTimeout(ChatTemplateError):
    """Rendering a template exceeded its time limit."""


def tokenizer_of(
    vocabulary: wire.Vocabulary,
    guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    calls: str | None = None,
    secret: bytes = b"",
) -> Tokenizer:
    """The tokenizer of the model that is served; `calls` is how it writes tool calls."""
    return Tokenizer(
        read_encoder(vocabulary.encoder),
        template=vocabulary.template,
        names=vocabulary.names,
        eos_tokens=tuple(vocabulary.eos_tokens),
        guard=guard,
        call_format=calls,
        response_template=vocabulary.response_template,
        secret=secret,
    )


class TextWorker:
    """Runs jobs."""

    def __init__(self, setup: jobs.Setup) -> None:
        self._tokenizer = tokenizer_of(
            setup.vocabulary, lambda: _alarm(setup.render_seconds), setup.calls, setup.secret
        )
        self._histories = Histories(self._tokenizer, setup.reasoning)
        self._tokens_max = setup.tokens_max
        self._answers = AnswerBuilder(self._tokenizer, Chosen(setup.calls, setup.reasoning))

    def answer(self, job: jobs.Job) -> jobs.Answer:
        """Run a job; every failure is a refusal."""
        try:
            return self._answer(job)
        except TooManyTokens as error:
            return jobs.Refused("context_length_exceeded", str(error), error.tokens)
        except ChatTemplateError as error:
            return jobs.Refused("chat_template", str(error))
        except HistoryDiffers as error:
            return jobs.Refused("history_differs", str(error), None, error.param)
        except ToolsRefused as error:
            return jobs.Refused("invalid_value", str(error), None, error.param)
        except AnswerRefused as error:
            return jobs.Refused(CODES.get(error.fault, "invalid_grammar"), str(error), None, error.field)
        except MemoryError:
            return jobs.Refused("tokenizer", "the input needs too much memory")
        except (RecursionError, TypeError, ValueError, OverflowError):
            return jobs.Refused("tokenizer", "the input cannot be tokenised")

    def _answer(self, job: jobs.Job) -> jobs.Answer:
        match job:
            case jobs.Text():
                tokens = self._tokenizer.encode(job.text, add_special_tokens=job.first, most=self._tokens_max)
                return jobs.Tokens(tokens)
            case jobs.Chat():
                return self._chat(job)
            case jobs.AnswerTo():
                return written(self._answers, job.tail, job.asks, read_asked_tools(job.asks))
            case jobs.Spell():
                return jobs.Spelled(self._tokenizer.decode(job.tokens, skip_special_tokens=False))
            case jobs.Body():
                return _read(job)
            case jobs.Setup():
                raise ValueError("a process is set up once")

    def _chat(self, job: jobs.Chat) -> jobs.Answer:
        tools = read_asked_tools(job.asks)
        shown = () if job.one_shot and tools.mode is Mode.NONE else tools.offered
        if not job.first:
            tokens = self._tokenizer.encode_continuation(
                job.messages,
                last_token=job.last_token,
                calls=[Call(each.id, each.name, each.arguments, Outcome(each.outcome)) for each in job.calls],
                tools=shown,
                template_kwargs=job.asks.template_kwargs,
                most=self._tokens_max,
                prompt_end=PromptEnd(job.prompt_end),
            )
            return written(self._answers, tokens, job.asks, tools)
        system = [] if job.system is None else [{"role": "system", "content": job.system}]
        messages = [*system, *job.messages]
        try:
            rendered = self._tokenizer.render_chat(
                messages,
                tools=shown,
                template_kwargs=job.asks.template_kwargs,
                prompt_end=PromptEnd(job.prompt_end),
            )
        except (ChatTemplateError, ToolsRefused) as error:
            raise _counted_from(len(system), error) from error
        start, match = 0, None
        if job.history is not None:
            about = (messages, shown, job.asks.template_kwargs)
            start = self._histories.end_in(rendered, unpack(job.history), *about, first=len(system))
        elif job.trails:
            match = find(rendered.text, job.trails, self._tokenizer.answer_text)
            start = 0 if match is None else match.characters
        tokens = self._tokenizer.encode_rendered(rendered, start, self._tokens_max)
        made = written(self._answers, tokens, job.asks, tools)
        if job.trails is None:
            return made
        return msgspec.structs.replace(made, found=self._found(rendered, tokens, match, job))

    def _found(
        self, rendered: RenderedChat, tokens: list[int], match: Match | None, job: jobs.Chat
    ) -> jobs.Found:
        """Where a conversation goes on, and the stretches of text that its new tokens are."""
        text, start = rendered.text, 0 if match is None else match.characters
        opening = self._tokenizer.opening(rendered, job.asks.template_kwargs)
        ending = self._tokenizer.encode(opening, add_special_tokens=False) if opening else []
        body = len(text) - len(opening)
        known = bool(ending) and body >= start and tokens[-len(ending) :] == ending
        if not known:
            body, ending = len(text), []
        places = places_in(text, start, body)
        counts = self._tokenizer.tokens_before(text[start:], [place - start for place in places])
        cuts = [(place, count) for place, count in zip(places, counts, strict=True) if count is not None]
        cuts += [(body, len(tokens) - len(ending)), (len(text), len(tokens))]
        firsts = [start, *(place for place, _ in cuts)]
        found = jobs.Found(
            [stretch_of(text, first, place) for first, (place, _) in zip(firsts, cuts, strict=False)],
            [count for _, count in cuts],
            known,
        )
        if match is None:
            return found
        return msgspec.structs.replace(
            found,
            trail=match.trail,
            stretches=match.stretches,
            is_all=match.is_all,
            said=match.said,
            merged=match.merged,
        )


def _counted_from(first: int, error: ChatTemplateError | ToolsRefused) -> ChatTemplateError | ToolsRefused:
    """An error with indices of messages that count from the client's first one."""

    def counted(text: str) -> str:
        return _PLACE.sub(lambda found: f"messages[{int(found[1]) - first}]", text)

    if isinstance(error, ToolsRefused):
        return ToolsRefused(counted(error.param), error.problem)
    return ChatTemplateError(counted(str(error)))


def _read(job: jobs.Body) -> jobs.Answer:
    """A JSON body as MessagePack; types are checked by the API process."""
    try:
        str(job.content, "utf-8")
        value = msgspec.json.decode(job.content)
    except UnicodeDecodeError:
        return jobs.Refused("invalid_json", "the body is not valid UTF-8")
    except RecursionError:
        return jobs.Refused("invalid_json", "the body is nested too deeply")
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ").lower()
        return jobs.Refused("invalid_json", f"the body is not valid JSON: {reason}")
    if count_values(value, job.values_max) > job.values_max:
        said = f"a body may hold at most {job.values_max} values"
        return jobs.Refused("too_many_values", said, None, _largest(value, job.values_max))
    try:
        return jobs.Read(memoryview(msgspec.msgpack.encode(value)))
    except OverflowError:
        return jobs.Refused("invalid_json", "the body holds a number of more than 64 bits")


def _largest(value: Any, most: int) -> str | None:
    """The field of a body that holds most values."""
    if not isinstance(value, dict):
        return None
    counts: dict[str, int] = {name: count_values(inner, most) for name, inner in value.items()}
    return max(counts, key=lambda name: counts[name])[:NAME_CHARACTERS_MAX]


def count_values(value: Any, most: int) -> int:
    """The number of values in a JSON value, itself and keys included; counting stops after `most`."""
    count = 1
    left = [value] if isinstance(value, NESTING) else []
    while left:
        value = left.pop()
        count += 2 * len(value) if isinstance(value, dict) else len(value)
        if count > most:
            break
        within = value.values() if isinstance(value, dict) else value
        left += [inner for inner in within if isinstance(inner, NESTING)]
    return count


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise after some seconds; a single long C call is not interrupted."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _overdue(_number: int, _frame: object) -> None:
    raise RenderTimeout("rendering the chat template exceeded its time limit")


def _limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes beyond its current size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _limit_time(more: float) -> None:
    """Limit processor time to `more` seconds from now on (RLIMIT_CPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + more)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def _next(source: BinaryIO) -> jobs.Job | None:
    header = source.read(jobs.LENGTHS.size)
    if len(header) < jobs.LENGTHS.size:
        return None
    length, attached = jobs.LENGTHS.unpack(header)
    return jobs.decode_job(source.read(length), memoryview(source.read(attached)))


def main() -> None:
    """Read jobs from standard input and write answers to standard output until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _overdue)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Output of libraries must not mix with answers.

    def say(answer: jobs.Answer) -> None:
        try:
            answers.writelines(jobs.frame(answer))
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # The API process is gone.

    setup = _next(sys.stdin.buffer)
    if not isinstance(setup, jobs.Setup):
        return
    os.nice(setup.nice)
    worker = TextWorker(setup)
    _limit_memory(setup.memory_bytes)
    say(jobs.Started())
    while (job := _next(sys.stdin.buffer)) is not None:
        _limit_time(setup.job_seconds)
        say(worker.answer(job))


if __name__ == "__main__":
    main()
