"""The codes of GGUF's formats mean what the gguf package dequantises, whole and in parts."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from holdfast.kernels.quantised import joined
from holdfast.kernels.torch.quantised import values
from holdfast.models.cuts import Cut, Cuts, CutSource
from holdfast.models.gguf_codes import read_codes
from tests.models.gguf_files import quantise, random_blocks
from tests.models.k_quants import WRITERS

PLAIN = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4)
NEAREST = {
    Kind.Q2_K: 0.35,
    Kind.Q3_K: 0.2,
    Kind.Q4_K: 0.1,
    Kind.Q5_K: 0.05,
    Kind.Q6_K: 0.025,
    Kind.IQ4_NL: 0.1,
    Kind.IQ4_XS: 0.1,
}
"""How far the tests' writers are from normally distributed weights at most, as a share of their norm."""


@pytest.mark.parametrize("kind", [*PLAIN, *WRITERS], ids=lambda kind: kind.name)
def test_codes_mean_what_the_package_reads(kind: Kind) -> None:
    raw = random_blocks(12, 768, kind, 5)
    codes = read_codes(torch.from_numpy(raw), kind, 12, 768)
    assert codes is not None
    dense = torch.from_numpy(gguf.dequantize(raw, kind))
    assert torch.equal(values(codes), dense)
    both = joined([codes, codes.rows(torch.tensor([3, 1]))])
    assert both is not None
    assert torch.equal(values(both), torch.cat((dense, dense[[3, 1]])))
    part = codes.columns([(512, 768), (0, 256)])
    assert part is not None
    assert torch.equal(values(part), torch.cat((dense[:, 512:], dense[:, :256]), dim=1))
    assert codes.columns([(0, 272)]) is None
    assert (codes.columns([(32, 64)]) is None) == (codes.super_scales is not None)


@pytest.mark.parametrize("kind", [Kind.IQ2_XXS, Kind.IQ3_S, Kind.TQ2_0, Kind.F16], ids=lambda kind: kind.name)
def test_other_formats_have_no_codes(kind: Kind) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    assert read_codes(torch.zeros(256 // block * size, dtype=torch.uint8), kind, 1, 256) is None


@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.name)
def test_the_writers_of_the_tests_round_to_near_weights(kind: Kind) -> None:
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(4)).numpy()
    weight[0, :256] = 0.0
    found = torch.from_numpy(gguf.dequantize(quantise(weight, kind), kind))
    assert float((found - torch.from_numpy(weight)).norm() / 110.8) <= NEAREST[kind]
    assert not found[0, :256].any()


class OneTensor:
    """A source of one matrix in Q6_K."""

    total_bytes = 0

    def __init__(self) -> None:
        self.raw = random_blocks(12, 768, Kind.Q6_K, 6)

    def names(self) -> frozenset[str]:
        return frozenset({"a.weight"})

    def shape(self, name: str) -> tuple[int, ...]:
        assert name == "a.weight"
        return (12, 768)

    def codes(self, name: str) -> object:
        assert name == "a.weight"
        return read_codes(torch.from_numpy(self.raw), Kind.Q6_K, 12, 768)


@pytest.mark.parametrize(("first", "count", "kept"), [(256, 512, True), (0, 384, False)])
def test_a_rank_reads_the_codes_of_its_part(first: int, count: int, kept: bool) -> None:
    """Where it divides super-blocks, the part is read dense."""
    whole, cuts = OneTensor(), Cuts()
    cuts.module("a", rows=Cut(12, ((8, 12), (0, 2))), columns=Cut.run(768, first, count))
    part = CutSource(whole, cuts, 2).codes("a.weight")  # type: ignore[arg-type]
    assert (part is not None) == kept
    if part is not None:
        dense = torch.from_numpy(gguf.dequantize(whole.raw, Kind.Q6_K))
        assert torch.equal(values(part), dense[[8, 9, 10, 11, 0, 1], first : first + count])
