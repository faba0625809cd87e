"""How SGLang's clients want `/generate` answered: one choice as it grows, in SGLang's own fields.

Text and token ids are whole in every chunk. Nothing here waits.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.server.http.answers import event
from holdfast.server.link import wire
from holdfast.server.routes.sglang_body import Asked

__all__ = ["Said"]

encode = msgspec.json.Encoder().encode

HEAD = b'data: {"text":"%b","output_ids":[%b],'
META = (
    b'"meta_info":{"id":%b,"finish_reason":null,"prompt_tokens":%d,"completion_tokens":%d,'
    b'"cached_tokens":%d}%b}\n\n'
)
"""A chunk without log-probabilities."""


class Said:
    """One choice while it is generated."""

    def __init__(
        self,
        rid: str,
        asked: Asked,
        tokens: list[int],
        tokenizer: Tokenizer,
        eos: list[int],
    ) -> None:
        """`tokens` are the new ones of its prompt; `eos` the model's end-of-sequence tokens."""
        self.rid = rid
        self.asked = asked
        self.text = ""
        self.tokens: list[int] = []
        self.prompt: tuple[int, int] | None = None
        self._sampling = sampling = asked.sampling
        self._input = tokens
        self._logprobs: list[Any] = []
        self._tops: list[Any] = []
        self._tokenizer = tokenizer
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
        self._written_text, self._written_ids = bytearray(), bytearray()
        """The text and the token ids so far, as JSON writes them."""

    def add(self, delta: wire.Delta) -> None:
        """Add a delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        if delta.prompt is not None:
            self.prompt = delta.prompt
        for entry in delta.logprobs or ():
            self._logprobs.append(self._shown(entry.logprob, entry.token))
            self._tops.append([self._shown(top.logprob, top.token) for top in entry.top])

    def event(self, delta: wire.Delta, index: int | None) -> bytes:
        """Add a delta; the choice so far as a server-sent event, with its number where there are several.

        The event is put together from what was encoded before, so that a token is encoded once.
        """
        self.add(delta)
        if self._sampling.logprobs is not None:
            shown = self.chunk()
            return event(shown if index is None else {**shown, "index": index})
        self._written_text += encode(delta.text)[1:-1]
        self._written_ids += (b"," if self._written_ids else b"") + encode(delta.tokens)[1:-1]
        prompt, cached = self.prompt if self.prompt is not None else (0, 0)
        more = b"" if index is None else b',"index":%d' % index
        counts = (encode(self.rid), prompt, len(self.tokens), cached, more)
        return HEAD % (self._written_text, self._written_ids) + META % counts

    def chunk(self) -> dict[str, Any]:
        """The choice so far."""
        prompt, cached = self.prompt if self.prompt is not None else (0, 0)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": None,
            "prompt_tokens": prompt,
            "completion_tokens": len(self.tokens),
            "cached_tokens": cached,
        }
        self._add_logprobs(meta, None)
        return {"text": self.text, "output_ids": self.tokens, "meta_info": meta}

    def whole(self, end: wire.End) -> dict[str, Any]:
        """The final choice; an aborted one has its text so far."""
        finished = end.outcome == "finished"
        reason: dict[str, Any]
        if not finished:
            reason = {"type": "abort", "message": end.reason, "status_code": None, "err_type": None}
        elif end.reason == "stop":
            reason = {"type": "stop", "matched": self._matched()}
        else:
            reason = {"type": "length", "length": len(self.tokens)}
        meta = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "cached_tokens": end.cached_tokens,
            "num_retractions": end.retracts,
            "e2e_latency": end.total_seconds,
        }
        self._add_logprobs(meta, end)
        return {"text": self.text, "output_ids": self.tokens, "meta_info": meta}

    def _matched(self) -> int | str | None:
        """The stop token or stop string; a token is kept in the text or removed, as `no_stop_trim` says.

        None if the turn ended because its grammar allows nothing more.
        """
        last = self.tokens[-1]
        if last not in self._ends:
            stops = self._sampling.stop_strings
            heard = self._tokenizer.decode(
                self.tokens, skip_special_tokens=self._sampling.skip_special_tokens
            )
            found = [(heard.find(stop), -len(stop), stop) for stop in stops if stop in heard]
            if found:
                return min(found)[2]
            return stops[0] if stops else None
        hidden = self._sampling.skip_special_tokens
        if self._sampling.keep_stop and hidden:
            self.text += self._tokenizer.decode([last], skip_special_tokens=True)
        elif not self._sampling.keep_stop and not hidden:
            self.text = self.text.removesuffix(self._tokenizer.decode([last], skip_special_tokens=False))
        return last

    def _shown(self, logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
        text = self._tokenizer.token_bytes(token).decode("utf-8", "replace") if self.asked.spelled else None
        return (logprob, token, text)

    def _add_logprobs(self, meta: dict[str, Any], end: wire.End | None) -> None:
        """Add log-probabilities if they were asked for; those of the prompt come with the end."""
        if self._sampling.logprobs is None:
            return
        entries, tops = ([], []) if end is None else self._of_prompt(end)
        meta["input_token_logprobs"] = entries
        meta["output_token_logprobs"] = self._logprobs
        meta["output_token_logprobs_length"] = len(self._logprobs)
        if self._sampling.logprobs:
            meta["input_top_logprobs"] = tops
            meta["output_top_logprobs"] = self._tops

    def _of_prompt(self, end: wire.End) -> tuple[list[Any], list[Any]]:
        """The prompt's tokens from `start` on; the first has no log-probability.

        In a session, history is not reported: the first is the turn's own first token.
        """
        if end.prompt_logprobs is None:
            return [], []
        history = end.prompt_tokens - len(self._input)
        start = max(self.asked.start, history)
        later = end.prompt_tokens - start - 1
        if later < 0 or later > len(end.prompt_logprobs):
            return [], []
        known = end.prompt_logprobs[len(end.prompt_logprobs) - later :]
        entries = [self._shown(None, self._input[start - history])]
        entries += [self._shown(entry.logprob, entry.token) for entry in known]
        tops: list[Any] = [None]
        tops += [[self._shown(top.logprob, top.token) for top in entry.top] for entry in known]
        return entries, tops
