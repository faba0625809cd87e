"""The C kernels against torch, compiled for each kind of processor."""

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from holdfast.kernels import attend, build_batch, configure
from holdfast.kernels.compiled import keep, kept
from holdfast.kernels.cpu import library, matrix, sampling
from holdfast.kernels.cpu.packing import eight_bit, pack_matrix
from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.kernels.settings import KernelSettings
from holdfast.kernels.torch import attention as torch_attention
from holdfast.kernels.torch import sampling as torch_sampling
from tests.kernels.rounding import rounded

if library.library() is None:
    pytest.skip("this machine has no C kernels", allow_module_level=True)


def random_matrix(bits: int, outputs: int, inputs: int) -> tuple[matrix.PackedMatrix, torch.Tensor]:
    """A packed matrix and the weight that it stands for."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    bias = torch.randn(outputs, generator=generator)
    if bits == 8:
        weight = torch.randn(outputs, inputs, generator=generator)
        packed = pack_matrix([eight_bit(weight)], bias=bias)
        scale = (weight.unflatten(1, (-1, 32)).abs().amax(dim=-1) / 127).repeat_interleave(32, dim=1)
        assert ((packed.rows(torch.arange(outputs)) - weight).abs() <= 0.52 * scale).all()
    else:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
        groups = (outputs, inputs // 32)
        scale, least = (torch.randn(groups, generator=generator).half() for _ in range(2))
        weight = codes.unflatten(1, (-1, 32)) * scale.float()[..., None] + least.float()[..., None]
        weight = weight.flatten(1)
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        packed = pack_matrix([QuantisedWeight(Codes.INT4, pairs, scale, 32, minima=least)], bias=bias)
        assert torch.allclose(packed.rows(torch.arange(outputs)), weight, rtol=1e-6, atol=1e-6)
    return packed, bias


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("row", [-1, 100, 1 << 40])
def test_a_row_that_is_out_of_range_is_refused_and_nothing_is_read(
    kernels: ctypes.CDLL, bits: int, row: int
) -> None:
    packed, _ = random_matrix(bits, 100, 96)
    with pytest.raises(IndexError, match="out of range: the matrix has 100"):
        packed.rows(torch.tensor([3, row, 7]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (100, 96), (48, 1536)])
def test_products(kernels: ctypes.CDLL, bits: int, outputs: int, inputs: int) -> None:
    packed, bias = random_matrix(bits, outputs, inputs)
    weight = packed.rows(torch.arange(outputs)).double()
    for rows in (1, 2, 3, 8, 13):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        x[-1, :32] = 0.0
        expected = rounded(x).double() @ weight.T + bias
        # A value exactly between two codes may go either way.
        assert ((packed(x) - expected).abs().max() / expected.abs().max()) < 2e-3
        exact = x.double() @ weight.T + bias
        assert (packed(x) - exact).norm() / exact.norm() < 0.02


TABLES = {
    Codes.E2M1: [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6],
    Codes.IQ4: [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_codes_that_stand_for_a_table(kernels: ctypes.CDLL, table: Codes) -> None:
    """Every code beside the largest activations, which eight bits hold; scales are powers of two."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (40, 96), dtype=torch.uint8, generator=generator)
    codes[0], codes[1] = 0, 15
    scale = torch.exp2(torch.randint(-8, 3, (40, 3), generator=generator).float())
    weight = torch.tensor(TABLES[table])[codes.long()] * scale.repeat_interleave(32, dim=1)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    packed = pack_matrix([QuantisedWeight(table, pairs, scale, 32)])
    assert torch.equal(packed.rows(torch.arange(40)), weight)
    x = torch.randint(-127, 128, (13, 96), generator=generator).float()
    x[:, ::32] = 127.0
    x[0] = 127.0
    for rows in (1, 3, 13):
        expected = x[:rows].double() @ weight.double().T
        assert (packed(x[:rows]) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_company(kernels: ctypes.CDLL, bits: int) -> None:
    packed, _ = random_matrix(bits, 80, 576)
    x = torch.randn(19, 576, generator=torch.Generator().manual_seed(0))
    together = packed(x)
    for threads in (1, 2):
        kernels.hf_threads(threads)
        for row in range(19):
            assert torch.equal(packed(x[row : row + 1])[0], together[row])
        assert torch.equal(packed(x[3:14]), together[3:14])


def test_largest_codes_do_not_overflow(kernels: ctypes.CDLL) -> None:
    codes = torch.full((16, 64), 127, dtype=torch.int8)
    packed = pack_matrix([QuantisedWeight(Codes.INT8, codes, torch.ones(16, 2), 32)])
    for sign in (1.0, -1.0):
        assert packed(torch.full((1, 64), sign)).tolist() == [[pytest.approx(64 * 127 * sign)] * 16]


def test_what_is_not_finite_stays_so(kernels: ctypes.CDLL) -> None:
    packed, _ = random_matrix(4, 32, 128)
    for poison in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(3, 128)
        x[1, 77] = poison
        out = packed(x)
        assert out[[0, 2]].isfinite().all()
        assert not out[1].isfinite().any()
    tiny = torch.full((1, 128), 1e-44)
    assert packed(tiny).isfinite().all()


def test_greatest_values(kernels: ctypes.CDLL) -> None:
    values = torch.randn(5, 1003, generator=torch.Generator().manual_seed(2))
    values[1, [7, 900]] = 9.0
    values[2, 1002] = 10.0
    values[3, 500] = torch.nan
    values[4] = -torch.inf
    found = sampling.argmax(values)
    assert found is not None
    peaks, places = found
    assert places[:3].tolist() == values[:3].argmax(dim=-1).tolist()
    assert places[1] == 7
    assert torch.equal(peaks[:3], values[:3].amax(dim=-1))
    assert not peaks[3].isfinite() and not peaks[4].isfinite()


LIMITS = {
    "everything": (0, 1.0, 0.0),
    "top-k": (40, 1.0, 0.0),
    "top-p": (0, 0.9, 0.0),
    "min-p": (0, 1.0, 0.02),
    "all": (300, 0.7, 0.001),
    "one": (1, 1.0, 0.0),
    "nothing": (0, 0.0, 0.0),
    "as many as there are": (5003, 0.999999, 0.0),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_draws_are_those_of_torch(
    kernels: ctypes.CDLL, limits: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 80, 5003
    generator = torch.Generator().manual_seed(int(10 * spread))
    logits = torch.randn(rows, columns, generator=generator) * spread
    logits[:, ::7] = logits[:, :1]  # Ties, which stay or go together.
    logits[:, 5] = -torch.inf
    temperature = torch.linspace(0.0, 1.5, rows)
    top_k, top_p, min_p = (torch.full((rows,), value) for value in LIMITS[limits])
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    given = (logits, temperature, top_k, top_p, min_p, seeds, torch.arange(rows) * 3)
    found = sampling.sample(*given)
    assert found is not None
    monkeypatch.setattr(sampling, "library", lambda: None)
    expected = torch_sampling.sample_tokens(*given)
    assert found[0] == logits[0].argmax()
    # Where two tokens arrive at almost the same time, or a share ends at a token, roundings may decide.
    assert int((found != expected).sum()) <= 1
    if limits == "everything":
        assert len(set(found.tolist())) > (4 if spread > 10 else 30)


def test_rows_without_a_greatest_value_have_no_token(kernels: ctypes.CDLL) -> None:
    logits = torch.zeros(4, 100)
    logits[0, 50] = torch.nan
    logits[1, 50] = torch.inf
    logits[2] = -torch.inf
    logits[3, 70] = 1e30
    ones = torch.ones(4)
    found = sampling.sample(
        logits, torch.tensor([1.0, 1.0, 1.0, 1e-30]), ones.int() * 5, ones * 0.9, ones * 0, *[ones.long()] * 2
    )
    assert found is not None
    assert found.tolist() == [-1, -1, -1, 70]


CASES = {
    "decode": ([1, 1, 1], [0, 70, 5]),
    "prompt": ([65], [0]),
    "mixed": ([1, 20, 7, 1], [130, 64, 0, 3]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("window", "sinks", "softcap"),
    [(None, False, None), (37, False, None), (16, True, None), (None, True, 8.0)],
)
def test_attention(
    kernels: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    window: int | None,
    sinks: bool,
    softcap: float | None,
) -> None:
    counts, starts = CASES[case]
    heads, kv_heads, dim, page_size = 6, 2, 48, 16
    pages = [-(-(start + count) // page_size) for start, count in zip(starts, counts, strict=True)]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).tolist()
    units = [[order.pop() for _ in range(count)] for count in pages]
    batch = build_batch([[0] * count for count in counts], starts, full_units=units, full_page_size=page_size)
    assert batch.full is not None
    generator = torch.Generator().manual_seed(3)
    storage = torch.full((sum(pages), 2, page_size, kv_heads, dim), torch.nan)
    for row, start, count in zip(units, starts, counts, strict=True):
        lowest = 0 if window is None else max(0, start - window + 1)
        for token in range(lowest, start + count):
            storage[row[token // page_size], :, token % page_size] = torch.randn(
                2, kv_heads, dim, generator=generator
            )
    query = torch.randn(sum(counts), heads, dim, generator=generator)
    weights = torch.randn(heads, generator=generator) if sinks else None
    key, value = storage[:, 0], storage[:, 1]
    rules = {"scale": 0.3, "window": window, "sinks": weights, "softcap": softcap}
    found = attend(query, key, value, batch.full, batch, **rules)
    monkeypatch.setattr(torch_attention, "attend_pages", lambda *_: None)
    expected = attend(query, key, value, batch.full, batch, **rules)
    assert expected.isfinite().all()
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty kernel cache."""
    configure(KernelSettings(cache=tmp_path))
    yield tmp_path
    configure(KernelSettings())


def test_without_a_compiler_there_are_no_kernels(cache: Path) -> None:
    configure(KernelSettings(cache=cache, c_compiler="no-such-compiler"))
    assert library.library() is None
    assert not list(cache.rglob("*.so"))


def test_kernels_can_be_switched_off(cache: Path) -> None:
    configure(KernelSettings(cache=cache, cpu=False))
    assert not matrix.available()


def test_a_failed_compilation_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-no-such-flag"))
    assert library.library() is None
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_file_that_was_half_written_is_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "FLAGS", tuple(flag for flag in library.FLAGS if flag != "-O3"))
    whole = library.compiled(("-DHOLDFAST_PORTABLE",))
    size = whole.stat().st_size
    with whole.open("r+b") as file:
        file.truncate(size // 2)
    again = library.compiled(("-DHOLDFAST_PORTABLE",))
    assert again == whole and again.stat().st_size == size
    assert library.calculates(library.load(again))


def test_who_starts_together_compiles_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the lock with a descriptor of its own, as processes do."""
    made: list[Path] = []
    together = threading.Barrier(4)

    def compile_one(command: list[str], target: Path) -> None:
        made.append(target)
        keep(target, b"compiled")

    def kept_at_first(target: Path) -> bytes | None:
        found = kept(target)
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            together.wait(60)
        return found

    seen: set[threading.Thread] = set()
    monkeypatch.setattr(library, "_compile", compile_one)
    monkeypatch.setattr(library, "kept", kept_at_first)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(library.compiled, [("-DHOLDFAST_PORTABLE",)] * 4))
    assert made == found[:1] == list(set(found))


def test_kernels_that_calculate_wrongly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.load(library.compiled(("-DHOLDFAST_PORTABLE",)))
    assert library.calculates(loaded)

    class Broken:
        """Answers zeros."""

        hf_pack = staticmethod(loaded.hf_pack)
        hf_packed_bytes = staticmethod(loaded.hf_packed_bytes)

        @staticmethod
        def hf_linear(*_: object) -> int:
            return 0

    assert not library.calculates(Broken())  # type: ignore[arg-type]
