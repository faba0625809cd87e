"""Triton kernels compile for a GPU, which the interpreter does not check; no GPU is needed for it.

A compiled kernel specialises an integer argument of 1 to a constant, which has no methods of a tensor. Each
process compiles all shapes of one kernel. It is a fork of one that has imported torch, Triton and the
kernels, and has hashed Triton's libraries for its cache, since that takes longer than most kernels.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO

import pytest

from holdfast.models.fp8 import CAPABILITY

ABSENT = """
import json
import os
import sys
import traceback
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Absent:
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_current_target(self): return GPUTarget("cuda", capability, 32)
    def get_active_torch_device(self): return torch.device("cpu")


driver.set_active(Absent())
launch = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **named: launch(
    self, *args, grid=grid, warmup=True, **named
)

"""

PROJECTIONS = """
from holdfast.kernels.triton import linear, linear_gated

for tokens, outputs in ((1, 1), (1, 24), (5, 1), (5, 24)):
    x, weight = torch.zeros(tokens, 64, dtype=torch.bfloat16), torch.zeros(outputs, 64, dtype=torch.bfloat16)
    linear(x, weight, None)
    linear_gated(x, torch.cat((weight, weight)), None, "swiglu")
print("compiled")
"""

EIGHT_BITS = """
from holdfast.kernels.triton import fp8

hopper = capability == 90
fp8.overlap = lambda x: {"OVERLAP": True, "launch_pdl": True} if hopper else {"OVERLAP": False}
fp8._multiplies = lambda index: hopper
fp8.processors = lambda index: 132
fp8.scaled_mm = lambda codes, weight, *rest, **named: torch.zeros(codes.shape[0], weight.shape[1])
every = len(sys.argv) > 1
for tokens, outputs in ((1, 1), (1, 256), (20, 256), (100, 256)):
    for depth in (256, 300):
        codes = torch.zeros(outputs, depth, dtype=torch.uint8).view(torch.float8_e4m3fn)
        for block in ((128, 128), (1, depth)):
            if not every and (depth == 256) != ((tokens > 1) == (block[0] > 1)):
                continue
            scales = torch.ones(-(-outputs // block[0]), -(-depth // block[1]))
            x = torch.zeros(tokens, depth, dtype=torch.bfloat16)
            assert fp8.linear_fp8(x, codes, scales, block, None).shape == (tokens, outputs)
print("compiled")
"""


QUANTISED = """
from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.kernels.triton import quantised, quantised_experts

hopper = capability == 90
quantised.overlap = lambda x: {"OVERLAP": True, "launch_pdl": True} if hopper else {"OVERLAP": False}
quantised.processors = lambda index: 132
forms = [
    (Codes.E2M1, 32, torch.uint8, False),
    (Codes.INT4, 128, torch.bfloat16, True),
    (Codes.INT4, 32, torch.float16, False),
    (Codes.E2M1, 16, torch.bfloat16, False),
    (Codes.INT8, 256, torch.bfloat16, False),
    (Codes.E4M3, 128, torch.float32, False),
]


def made(kind, group, dtype, zeros, *shape):
    *lead, outputs, inputs = shape
    codes = torch.zeros(*lead, outputs, inputs * kind.bits // 8, dtype=torch.uint8)
    scales = torch.zeros(*lead, outputs, inputs // group, dtype=dtype)
    if kind is Codes.INT8:
        codes = codes.view(torch.int8)
    points = torch.zeros_like(scales, dtype=torch.uint8) if zeros else None
    order = torch.zeros(*lead, inputs, dtype=torch.int32) if zeros else None
    return QuantisedWeight(kind, codes, scales, group, points, None, order)


for form in forms[: int(sys.argv[1])]:
    for tokens in (1, 100):
        x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
        assert quantised.linear_quantised(x, made(*form, 128, 256), None).shape == (tokens, 128)
    x, ids, shares = x[:3], torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    w13, w2 = made(*form, 4, 512, 256), made(*form, 4, 256, 256)
    assert quantised_experts.experts_quantised(x, ids, shares, w13, w2).shape == x.shape
print("compiled")
"""


ROUTERS = """
import holdfast.kernels.triton.router as router
from holdfast.kernels import RouterForm

router.overlap = lambda x: {"OVERLAP": True, "launch_pdl": True} if capability == 90 else {"OVERLAP": False}
for tokens, experts, dtype in ((1, 1, torch.bfloat16), (5, 20, torch.float32), (70, 512, torch.bfloat16)):
    x, weight = torch.zeros(tokens, 300, dtype=torch.bfloat16), torch.zeros(experts, 300, dtype=dtype)
    for kind in ("softmax_then_top", "top_then_softmax", "sigmoid_in_groups"):
        form = RouterForm(kind, min(experts, 10), True)
        assert router.route(x, weight, torch.zeros(experts), form)[0].shape == (tokens, form.picks)
print("compiled")
"""


UNITS = """
from holdfast.kernels.triton import copy_units, move_units

for units, width in ((1, 1), (1, 5000), (40, 1), (40, 5000)):
    storage = torch.zeros(units + 1, width, dtype=torch.float64)
    these, those = torch.arange(units), torch.arange(units) + 1
    copy_units(storage, these, those)
    move_units(storage, these, torch.zeros_like(storage), those)
print("compiled")
"""


ATTENTION = """
import holdfast.kernels.triton.attention as attention
import holdfast.kernels.triton.pieces as pieces
from holdfast.kernels import Pieces, ScaledCache, build_batch, tile_count
from holdfast.kernels.batch import PIECE_FIELDS

most, dim, scaled = int(sys.argv[1]) << 10, int(sys.argv[2]), int(sys.argv[3])
first, step = int(sys.argv[4]), int(sys.argv[5])
attention.roomy = pieces.roomy = lambda index: most >= 160 << 10
hopper = {"OVERLAP": True, "launch_pdl": True}
attention.overlap = pieces.overlap = lambda query: hopper if capability == 90 else {"OVERLAP": False}
attention.processors = lambda index: 132
page, heads, kv_heads = 16, 8, 2
needed = []
counted = JITFunction.run


def count(self, *args, grid, warmup, **named):
    needed.append(counted(self, *args, grid=grid, warmup=warmup, **named).metadata.shared)


JITFunction.run = count
for counts, start, window, listed in (
    ([1] * 2, 5000, None, False),
    ([200] * 90, 0, None, False),
    ([256], 9000, None, False),
    ([256], 900, None, False),
    ([200] * 90, 0, 64, False),
    ([1, 40], 100, None, True),
)[first::step]:
    units = [list(range(-(-(start + count) // page))) for count in counts]
    kind = "window" if window else "full"
    given = {f"{kind}_units": units, f"{kind}_page_size": page}
    batch = build_batch([[0] * count for count in counts], [start] * len(counts), **given)
    if listed:
        lines = tile_count(sum(counts), len(counts), 4) + 9
        fields = torch.zeros(lines, PIECE_FIELDS, dtype=torch.int32)
        arrived = torch.zeros(lines * kv_heads, dtype=torch.int32)
        batch.pieces = tuple(Pieces(fields, arrived, queries, 9) for queries in (4, 16))
    query = torch.zeros(sum(counts), heads, dim, dtype=torch.bfloat16)
    cache = torch.zeros(4, 2, page, kv_heads, dim, dtype=torch.bfloat16)
    caches = cache[:, 0], cache[:, 1]
    if scaled:
        codes, scales = cache.view(torch.uint8)[..., :dim], torch.zeros(4, kv_heads, page, dtype=torch.uint8)
        caches = [ScaledCache(codes[:, part], scales) for part in range(2)]
    held = batch.full or batch.window
    attention.attend(query, *caches, held, batch, scale=1.0, window=window)
assert max(needed) <= most, needed
print("compiled")
"""


LISTS = """
from holdfast.kernels import PieceQueue, Pieces, build_batch, tile_count
from holdfast.kernels.batch import PIECE_FIELDS, QUEUE_FIELDS, queue_lines
from holdfast.kernels.triton import list_pieces

for rows, kv_heads in ((1, 1), (64, 8)):
    batch = build_batch([[0]] * rows, [70] * rows)
    nothing = torch.zeros(0, dtype=torch.int32)
    lines = queue_lines(rows, rows, 32, kv_heads, 132)
    listed = torch.zeros(lines, QUEUE_FIELDS, dtype=torch.int32)
    batch.queue = PieceQueue(listed, nothing, nothing, nothing, 32, kv_heads, 132)
    list_pieces(batch)
    batch.queue = None
    listed = torch.zeros(tile_count(rows, rows, 4) + 9, PIECE_FIELDS, dtype=torch.int32)
    batch.pieces = (Pieces(listed, nothing, 4, 9),)
    list_pieces(batch)
print("compiled")
"""


STEPS = """
from holdfast.engine.step.inputs import Components, Limits, Lists, Shape, StepBuffers, views
from holdfast.kernels import StepTables
from holdfast.kernels.triton import prepare_step
from holdfast.kernels.triton.step import _prepare

least, most = int(sys.argv[1]), int(sys.argv[2])
sampled, device = torch.zeros(40, dtype=torch.int64), torch.device("cpu")
for rows in range(least, most + 1):
    for width in (1, 16, 17):
        shape = Shape(rows, 3 * rows, rows - rows % 3, False)
        given = views(torch.zeros(shape.words, dtype=torch.int32), shape)
        buffers = StepBuffers(device, shape, width, Components(True, True))
        batch = buffers.batch(given, shape, 16, Limits(3, 16 * width, 0), Lists())
        table = torch.zeros(40, 2 * width - 1, dtype=torch.int32)
        prepare_step(given.tokens, given.row_table, StepTables(sampled, table, table, 7, 8), batch)
found = len(_prepare.device_caches[0][0])
assert found == 1, f"{found} variants were compiled"
print("compiled")
"""


SAMPLING = """
from holdfast.kernels import TokenMasks
from holdfast.kernels.triton import sampling

arguments = {}
for kernel in (sampling._find_peaks, sampling._draw_sections, sampling._weigh_sections, sampling._choose):
    def count(*args, kernel=kernel, launch=kernel.run, grid, warmup, **named):
        made = launch(*args, grid=grid, warmup=warmup, **named)
        kinds = made.src.signature.values()
        arguments.setdefault(kernel.__name__, []).append(sum(kind != "constexpr" for kind in kinds))
    kernel.run = count
for rows, width in ((1, 30), (5, 151_936)):
    logits = torch.zeros(rows, width, dtype=torch.bfloat16)
    floats, whole = torch.zeros(rows), torch.zeros(rows, dtype=torch.int32)
    given = (floats, whole, floats, floats, whole.long(), whole)
    masks = torch.zeros(1, -(-width // 32), dtype=torch.int32)
    sampling.sample_tokens(logits, *given)
    sampling.sample_tokens(logits, *given, masks=TokenMasks(masks, whole))
# Two pointers, and of the sizes those that are not 1: the arguments that a mask costs.
for name, found in arguments.items():
    plain, masked = found[-2:]
    assert masked == plain + 4, (name, found)
assert arguments["_find_peaks"][-2] == 6, arguments
print("compiled")
"""


FORKS = """
import holdfast.kernels.triton
import holdfast.engine.step.inputs
from triton.runtime.cache import triton_key

triton_key()
for line in sys.stdin:
    source, arguments, capability = json.loads(line)
    source_end, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.argv = ["-c", *arguments]
        try:
            exec(source)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.close(sink)
    said = open(source_end).read()
    os.waitpid(child, 0)
    print(json.dumps(said), flush=True)
"""

Compiles = Callable[..., None]


@pytest.fixture(scope="module")
def compiler() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch and Triton, and forks for each source."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", ABSENT + FORKS]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        stream(process.stdin).close()


def stream(given: IO[str] | None) -> IO[str]:
    assert given is not None
    return given


@pytest.fixture
def compiles(compiler: subprocess.Popen[str]) -> Compiles:
    def compiled(source: str, *arguments: int, capability: int = 90) -> None:
        request = [source, [str(argument) for argument in arguments], capability]
        stream(compiler.stdin).write(json.dumps(request) + "\n")
        stream(compiler.stdin).flush()
        said = json.loads(stream(compiler.stdout).readline())
        assert said == "compiled\n", said[-2000:]

    return compiled


def test_projections_of_any_width_compile(compiles: Compiles) -> None:
    compiles(PROJECTIONS)


@pytest.mark.parametrize("every", [(), pytest.param((1,), marks=pytest.mark.soak)], ids=["pairs", "every"])
@pytest.mark.parametrize("capability", [90, 10 * CAPABILITY[0] + CAPABILITY[1]])
def test_projections_in_eight_bits_compile(
    compiles: Compiles, capability: int, every: tuple[int, ...]
) -> None:
    """For Hopper, and for the oldest GPU that runs them; pairs of depths and blocks in `make test`.

    The interpreter has no 8-bit floats: results are checked on a GPU.
    """
    compiles(EIGHT_BITS, *every, capability=capability)


@pytest.mark.parametrize(
    ("capability", "forms"),
    [(90, 1), pytest.param(90, 6, marks=pytest.mark.soak), pytest.param(80, 6, marks=pytest.mark.soak)],
)
def test_products_with_quantised_weights_compile(compiles: Compiles, capability: int, forms: int) -> None:
    """For Hopper, and for the oldest GPU with bfloat16; MXFP4 alone in `make test`."""
    compiles(QUANTISED, forms, capability=capability)


def test_sampling_compiles_and_without_masks_has_no_arguments_for_them(compiles: Compiles) -> None:
    compiles(SAMPLING)


@pytest.mark.parametrize("capability", [80, 90])
def test_routers_compile(compiles: Compiles, capability: int) -> None:
    compiles(ROUTERS, capability=capability)


def test_copies_of_units_compile(compiles: Compiles) -> None:
    compiles(UNITS)


@pytest.mark.parametrize(
    ("kibibytes", "first", "step"),
    [
        (99, 0, 2),
        pytest.param(99, 1, 2, marks=pytest.mark.soak),
        pytest.param(227, 0, 1, marks=pytest.mark.soak),
    ],
)
def test_attention_of_wide_heads_fits_into_the_shared_memory(
    compiles: Compiles, kibibytes: int, first: int, step: int
) -> None:
    """That of the GPUs of compute capability 8.9 and 9.0. Half of the shapes of batches in `make test`."""
    compiles(ATTENTION, kibibytes, 256, 0, first, step)


@pytest.mark.parametrize(
    ("capability", "dim", "first", "step"),
    [
        (90, 128, 1, 2),
        pytest.param(90, 128, 0, 2, marks=pytest.mark.soak),
        pytest.param(90, 256, 0, 1, marks=pytest.mark.soak),
        pytest.param(89, 64, 0, 1, marks=pytest.mark.soak),
    ],
)
def test_attention_over_eight_bits_compiles(
    compiles: Compiles, capability: int, dim: int, first: int, step: int
) -> None:
    """In `make test` the shapes of batches that the test of wide heads leaves out there."""
    compiles(ATTENTION, 227 if capability == 90 else 99, dim, 1, first, step, capability=capability)


def test_lists_of_pieces_compile(compiles: Compiles) -> None:
    compiles(LISTS)


def test_steps_of_about_one_size_are_prepared_by_one_kernel(compiles: Compiles) -> None:
    """Whatever their samples and contexts: compiling a variant while serving would stall every stream."""
    compiles(STEPS, 4, 7)
