"""A step's words hold its rows; the rest of the shape is padding."""

from typing import Any

import numpy as np
import torch

from holdfast.core.plan import Row
from holdfast.engine.step.inputs import Padding, Parameters, Sample, Shape, pack, views
from holdfast.engine.step.staging import Staging

PADDING = Padding(state=99, sampler_row=8, note=55)
PARAMETERS = Parameters(
    seeds=np.array([0, 1, 2, 3, 4, 5, -6, (7 << 40) + 1, 0], dtype=np.int64),
    floats=np.array([[0.25 * row + value for row in range(9)] for value in (0, 10, 20)], dtype=np.float32),
    top_k=np.arange(100, 109, dtype=np.int32),
)


def row(
    start: int, tokens: list[int], count: int | None = None, state: tuple[int | None, int] | None = None
) -> Row[Any]:
    made = Row(None, 1, start, len(tokens) if count is None else count, tokens, True, None)
    made.state = state
    return made


def packed(
    shape: Shape, rows: list[Row[Any]], tables: list[int], samples: list[Sample]
) -> dict[str, list[Any]]:
    words = np.full(shape.words, -1234, dtype=np.int32)
    states = [
        None if row.state is None else (-1 if row.state[0] is None else row.state[0], row.state[1])
        for row in rows
    ]
    pack(words, shape, rows, states, tables, samples, PARAMETERS, PADDING)
    found = views(torch.from_numpy(words), shape)
    return {name: getattr(found, name).tolist() for name in found.__slots__}


def test_a_decode_step_is_filled_up_with_rows_of_one_token() -> None:
    rows = [row(9, [], 1, (3, 4)), row(0, [8], state=(None, 5))]
    samples = [Sample(0, 10, 6, 20), Sample(1, 1, 7, 21)]
    found = packed(Shape(4, 4, 4, True), rows, [20, 21], samples)
    assert found["tokens"] == [-1, 8, 0, 0]
    assert found["row_table"] == [20, 21, -1, -1]
    assert found["row_start"] == [0, 1, 2, 3, 4]
    assert found["context"] == [10, 1, 1, 1]
    assert found["state_source"] == [3, -1, -1, -1]
    assert found["state_destination"] == [4, 5, 99, 99]
    assert found["sample_place"] == [0, 1, 0, 0]
    assert found["sample_position"] == [10, 1, 0, 0]
    assert found["note"] == [20, 21, 55, 55]
    assert found["seeds"] == [-6, (7 << 40) + 1, 0, 0]
    assert found["temperature"] == [1.5, 1.75, 2.0, 2.0]
    assert found["top_p"] == [11.5, 11.75, 12.0, 12.0]
    assert found["min_p"] == [21.5, 21.75, 22.0, 22.0]
    assert found["top_k"] == [106, 107, 108, 108]


def test_a_mixed_step_is_filled_up_with_rows_of_no_tokens() -> None:
    rows = [row(5, [1, 2, 3]), row(7, [4, 5], 3)]
    found = packed(Shape(4, 8, 4, False), rows, [2, 3], [Sample(5, 10, 1, 3)])
    assert found["tokens"] == [1, 2, 3, 4, 5, -1, 0, 0]
    assert found["row_start"] == [0, 3, 6, 6, 6]
    assert found["context"] == [8, 10, 0, 0]
    assert found["note"] == [3, 55, 55, 55]
    assert found["top_k"] == [101, 108, 108, 108]


def test_seeds_are_where_words_of_64_bits_may_be() -> None:
    """Also where a step has an odd number of samples, and of everything else."""
    found = packed(Shape(3, 5, 3, False), [row(0, [1, 2, 3, 4, 5])], [7], [Sample(4, 5, 7, 7)])
    assert found["seeds"] == [(7 << 40) + 1, 0, 0]
    assert found["tokens"] == [1, 2, 3, 4, 5]


def test_words_and_tokens_pass_through_on_a_cpu() -> None:
    staging = Staging(torch.device("cpu"))
    words = staging.words(5)
    words[:] = torch.arange(5)
    assert staging.send(words, None).tolist() == [0, 1, 2, 3, 4]
    target = torch.zeros(8, dtype=torch.int32)
    assert staging.send(words, target).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    tokens = torch.tensor([7, -1])
    arrival = staging.fetch(tokens)
    tokens.zero_()
    assert arrival.wait() == [7, -1]


def test_inputs_begin_where_vectors_may_whatever_the_size_of_a_step() -> None:
    """A kernel would be compiled anew, while everybody waits, for each combination of other addresses."""
    for rows in range(1, 9):
        for samples in range(1, rows + 1):
            shape = Shape(rows, rows + 3, samples, False)
            words = torch.zeros(shape.words, dtype=torch.int32)
            found = views(words, shape)
            places = [getattr(found, name).data_ptr() - words.data_ptr() for name in found.__slots__]
            assert [place % 16 for place in places] == [0] * len(places)
            assert found.row_start.shape == (rows + 1,) and found.tokens.shape == (rows + 3,)
            assert shape.words % 4 == 0, "what comes behind the words begins well, too"
