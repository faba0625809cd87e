"""`holdfast bench wire`: the same turns in process and over HTTP, with every span of every turn."""

import json

from holdfast.bench.wire.figures import HTTP, INSIDE, figures_of, round_table, span_figures, span_table
from holdfast.bench.wire.inside import InProcess
from holdfast.bench.wire.load import Round, RoundSamples, TurnSample, Workload, tokens_of
from holdfast.server.telemetry.tracing import SPANS
from tests.preloaded import commands

ROUND = Round(2, 64)


def test_streams_share_no_beginning_and_ids_fit_every_vocabulary() -> None:
    inputs = [tokens_of(stream, 0, 300) for stream in range(64)]
    assert len({tuple(tokens[:16]) for tokens in inputs}) == 64
    assert all(0 < token < 256 for tokens in inputs for token in tokens)


def test_in_process_every_turn_ends_and_half_of_the_cut_phase_is_aborted() -> None:
    workload = Workload([ROUND], turns=3, aborts=2, given=8, wanted=6)
    engine = InProcess("echo", {"context_length": 4096, "overlap": True}, workload)
    samples = engine.run(0, ROUND)
    assert [turn.tokens for turn in samples.turns if not turn.after_abort] == [6] * 6
    assert [turn.tokens for turn in samples.turns if turn.after_abort] == [6] * 4
    assert all(0 < turn.first <= turn.total for turn in samples.turns)
    assert not engine._loop.scheduler.registry.sessions and not engine._loop.busy


def test_figures_are_medians_of_whole_turns() -> None:
    turns = [TurnSample(0.001 * number, 0.1, 11, 0.002) for number in (1, 2, 9)]
    turns.append(TurnSample(0.5, 0.6, 11, 0.002, after_abort=True))
    samples = RoundSamples(turns, 0.33, {"api": 0.0033, "engine": 0.00066})
    found = {figure["name"]: figure["value"] for figure in figures_of(ROUND, HTTP, samples)}
    assert found["first_token_ms"] == 2.0 and found["first_token_p99_ms"] == 9.0
    assert found["after_abort_ms"] == 500.0 and found["step_ms"] == 9.8
    assert found["tokens_per_second"] == 100.0
    assert found["api_us_per_token"] == 100.0 and found["engine_us_per_token"] == 20.0


def test_over_http_every_span_of_every_turn_is_shown() -> None:
    command = (
        "bench wire --streams 2 --history 64 --turns 2 --aborts 1 --input-tokens 8 --output-tokens 8 --json"
    )
    done = commands.run(*command.split(), text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    spans = {figure["name"]: figure["turns"] for figure in figures if figure["name"].startswith("span")}
    # The end of a turn may come in one message with its first token, before that is written.
    assert spans | {"span write": 4} == {f"span {name}": 4 for name in SPANS}
    for system in (INSIDE, HTTP):
        names = {figure["name"] for figure in figures if figure["system"] == system}
        assert {"first_token_ms", "after_abort_ms", "engine_us_per_token"} <= names
    table = round_table([ROUND], figures, "wire")
    assert table.row_count == 2
    assert span_table([ROUND], figures).row_count == len(SPANS)


def test_a_span_that_no_turn_came_to_is_left_out() -> None:
    (figure,) = span_figures(ROUND, {"parse": [3, 1, 2]})
    assert (figure["name"], figure["value"], figure["p99"], figure["turns"]) == ("span parse", 2, 3, 3)
