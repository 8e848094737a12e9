"""The CPU kernels against float64, their arguments' checks, other compilers and processors, sanitizers."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, require_tool
from hypothesis import given
from hypothesis import strategies as st

from neo_lite import kernel_build
from neo_lite.config import NeoLiteError
from neo_lite.cpu_attention import RUNGS, KernelSpec, load_kernel

TINY = KernelSpec(16, 2, 16, "float32")


def reference(q, k, v, table, lens):  # type: ignore[no-untyped-def]
    """Decode attention in float64, one sequence and one block at a time."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group, block_size = q.shape[1] // k.shape[1], k.shape[2]
    for b, n in enumerate(lens.tolist()):
        blocks = table[b, : -(-n // block_size)].long()
        keys, values = (
            c[blocks].double().transpose(0, 1).flatten(1, 2)[:, :n].repeat_interleave(group, 0) for c in (k, v)
        )
        scores = torch.einsum("hd,htd->ht", q[b].double(), keys) * q.shape[2] ** -0.5
        if n:
            out[b] = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
    return out


def case(spec, lens, kv_heads=2, seed=0, size=1.0):  # type: ignore[no-untyped-def]
    """Random q, caches with blocks in random order and NaN in every slot that no token has, table, lengths."""
    rng = torch.Generator().manual_seed(seed)
    block, width = spec.block_size, max([-(-n // spec.block_size) for n in lens], default=0)
    dtype = getattr(torch, spec.dtype)
    table = torch.randperm(len(lens) * width + 3, generator=rng)[: len(lens) * width].reshape(len(lens), width).int()
    k, v = (torch.full((len(lens) * width + 3, kv_heads, block, spec.head_dim), torch.nan, dtype=dtype) for _ in "kv")
    for b, n in enumerate(lens):
        for i, start in enumerate(range(0, n, block)):
            rows = min(block, n - start)
            for cache in (k, v):
                cache[table[b, i], :, :rows] = (torch.randn(kv_heads, rows, spec.head_dim, generator=rng) * size).to(
                    dtype
                )
    q = (torch.randn(len(lens), kv_heads * spec.group, spec.head_dim, generator=rng) * size).to(dtype)
    return q, k, v, table, torch.tensor(lens, dtype=torch.int32)


def check(spec, out, expected):  # type: ignore[no-untyped-def]
    """1e-5 in fp32; in fp16 and bf16 2e-4 beyond the rounding of the output itself (a half unit in its last place)."""
    unit = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[spec.dtype]
    beyond = ((out.double() - expected).abs() - unit * expected.abs()).clamp(min=0).norm() / expected.norm().clamp(
        min=1e-30
    )
    assert torch.isfinite(out).all()
    assert beyond < (1e-5 if spec.dtype == "float32" else 2e-4)
    assert (out.double() - expected).norm() <= (1e-5 if spec.dtype == "float32" else 2e-3) * expected.norm()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rung", RUNGS)
def test_rung_equals_float64(rung: str, dtype: str) -> None:
    spec = KernelSpec(64, 3, 16, dtype, rung=rung)
    inputs = case(spec, [1, 2, 0, 15, 16, 17, 255, 256, 257, 1000])
    out = load_kernel(spec)(*inputs, num_threads=2)
    check(spec, out, reference(*inputs))
    assert (out[2] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim,group,block_size", [
    (64, 1, 256), (80, 8, 16), (96, 1, 8), (128, 4, 16), (128, 1, 32), (256, 7, 64), (24, 5, 12), (48, 2, 1),
    (64, 71, 16),
])  # fmt: skip
def test_any_shape_equals_float64(head_dim: int, group: int, block_size: int, dtype: str) -> None:
    spec = KernelSpec(head_dim, group, block_size, dtype)
    inputs = case(spec, [1, 7, 8, 9, 300, 511, 512, 513, 4097], kv_heads=1)
    check(spec, load_kernel(spec)(*inputs, num_threads=3), reference(*inputs))


@given(lens=st.lists(st.integers(0, 700), max_size=6), threads=st.integers(1, 4), seed=st.integers(0, 99))
def test_any_lengths_equal_float64(lens: list[int], threads: int, seed: int) -> None:
    inputs = case(TINY, lens, seed=seed)
    check(TINY, load_kernel(TINY)(*inputs, num_threads=threads), reference(*inputs))


@pytest.mark.parametrize("rung", RUNGS)
def test_extreme_logits_are_no_nan(rung: str) -> None:
    spec = KernelSpec(64, 3, 16, "float16", rung=rung)
    inputs = case(spec, [1, 100, 300], size=1000.0)
    check(spec, load_kernel(spec)(*inputs, num_threads=2), reference(*inputs))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rung", RUNGS)
def test_new_token_is_stored_first(rung: str, fused: bool) -> None:
    """Also where q, k and v lie side by side, as the projection gives them; what they are never read beyond is NaN."""
    spec = KernelSpec(64, 3, 16, "float16", rung=rung)
    q, k, v, table, lens = case(spec, [1, 17, 300, 0])
    expected = reference(q, k, v, table, lens)
    news = []
    places = [(int(table[b, max(n - 1, 0) // 16]), max(n - 1, 0) % 16) for b, n in enumerate([1, 17, 300])]
    places.append((0, 0))  # of the empty sequence: never read
    for cache in (k, v):
        news.append(torch.stack([cache[block, :, slot] for block, slot in places]))
    wiped = [c.clone() for c in (k, v)]
    for cache in wiped:
        for block, slot in places[:3]:
            cache[block, :, slot] = torch.nan
    if fused:
        rows = torch.cat((q, *news, torch.full_like(news[0], torch.nan)), dim=1)
        q, *news = rows.split((q.shape[1], *[len(k[0])] * 3), dim=1)[:3]
        assert not q.is_contiguous() and not news[0].is_contiguous()
    out = load_kernel(spec)(q, *wiped, table, lens, num_threads=2, k_new=news[0], v_new=news[1])
    assert out.is_contiguous()
    check(spec, out, expected)
    assert torch.equal(wiped[0].nan_to_num(), k.nan_to_num()) and torch.equal(wiped[1].nan_to_num(), v.nan_to_num())


BAD = {
    "q has shape": lambda a: a.update(q=a["q"][:, :1].contiguous()),
    "q is float64": lambda a: a.update(q=a["q"].double()),
    "k_cache has shape": lambda a: a.update(k_cache=a["k_cache"][:, :, :8].contiguous()),
    "v_cache has shape": lambda a: a.update(v_cache=a["v_cache"][:2]),
    "v_cache has strides": lambda a: a.update(v_cache=a["v_cache"].transpose(2, 3).contiguous().transpose(2, 3)),
    "block_table is int64": lambda a: a.update(block_table=a["block_table"].long()),
    "block_table[1] holds block -1": lambda a: a["block_table"][1].fill_(-1),
    "block_table[0] holds block 99": lambda a: a["block_table"][0].fill_(99),
    "seq_lens has shape": lambda a: a.update(seq_lens=a["seq_lens"][:1]),
    "seq_lens[1] is 99": lambda a: a["seq_lens"][1].fill_(99),
    "seq_lens[0] is -1": lambda a: a["seq_lens"][0].fill_(-1),
    "k_scale is given": lambda a: a.update(k_scale=torch.ones(2, 2, 16, dtype=torch.float16)),
    "v_new is missing": lambda a: a.update(k_new=torch.zeros(2, 2, 16)),
    "v_new has strides": lambda a: a.update(k_new=torch.zeros(2, 2, 16), v_new=torch.zeros(2, 16, 2).transpose(1, 2)),
    "rows of different strides": lambda a: a.update(k_new=torch.zeros(2, 2, 16), v_new=torch.zeros(2, 5, 16)[:, :2]),
    "out has strides": lambda a: a.update(out=torch.zeros(2, 5, 16)[:, :4]),
    "out has shape": lambda a: a.update(out=torch.zeros(1, 4, 16)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_argument_is_named_before_anything_is_touched(message: str) -> None:
    q, k, v, table, lens = case(TINY, [16, 20])
    arguments = dict(q=q, k_cache=k, v_cache=v, block_table=table, seq_lens=lens)
    BAD[message](arguments)
    with pytest.raises(NeoLiteError, match=message.replace("[", r"\[").replace("]", r"\]")):
        load_kernel(TINY)(**arguments)


def test_int8_without_scales_and_another_number_of_dimensions_are_named() -> None:
    q, k, v, table, lens = case(TINY, [16, 20])
    int8 = load_kernel(KernelSpec(16, 2, 16, "float32", "int8"))
    with pytest.raises(NeoLiteError, match="k_scale is missing: give a float16 tensor of shape"):
        int8(q, k.to(torch.int8), v.to(torch.int8), table, lens)
    with pytest.raises(NeoLiteError, match="q must be"):
        load_kernel(TINY)(q[0], k, v, table, lens)


def test_entries_beyond_a_length_may_be_anything() -> None:
    q, k, v, table, lens = case(TINY, [16, 64])
    table[0, 1:] = -1
    check(TINY, load_kernel(TINY)(q, k, v, table, lens), reference(q, k, v, table, lens))


@pytest.mark.parametrize("fields", [
    dict(head_dim=20), dict(group=0), dict(block_size=0), dict(dtype="int8"), dict(kv_dtype="float16"),
    dict(rung="fast"),
])  # fmt: skip
def test_bad_spec_is_named(fields: dict) -> None:
    with pytest.raises(NeoLiteError, match=str(next(iter(fields.values())))):
        KernelSpec(**{**dict(head_dim=64, group=1, block_size=16, dtype="float32"), **fields})


# ---- int8 ----
def quantized(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and one fp16 scale for each, as kernels/attention.h makes them; unused slots: 99 and NaN."""
    scale = (cache.float().abs().amax(-1) / 127).half()
    rows = (cache.float() / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
    return rows.nan_to_num(99).to(torch.int8), scale


@pytest.mark.parametrize(
    "rung,head_dim,group", [*((rung, 64, 4) for rung in RUNGS), ("flash", 128, 1), ("flash", 128, 7), ("flash", 80, 3)]
)
def test_int8_equals_float64_of_what_is_stored(rung: str, head_dim: int, group: int) -> None:
    spec = KernelSpec(head_dim, group, 16, "float16", "int8", rung)
    q, k, v, table, lens = case(spec, [1, 15, 0, 64, 65, 700])
    (k8, k_scale), (v8, v_scale) = quantized(k), quantized(v)
    stored = [c.double() * s.double().unsqueeze(-1) for c, s in ((k8, k_scale), (v8, v_scale))]
    out = load_kernel(spec)(q, k8, v8, table, lens, k_scale=k_scale, v_scale=v_scale, num_threads=2)
    check(spec, out, reference(q, *stored, table, lens))
    assert (out.double() - reference(q, k, v, table, lens)).norm() < 0.02 * out.double().norm()


def test_int8_new_token_leaves_the_others_alone() -> None:
    spec = KernelSpec(64, 1, 16, "float16", "int8")
    q, k, v, table, lens = case(spec, [20])
    (k8, k_scale), (v8, v_scale) = quantized(k), quantized(v)
    before, block = [c.clone() for c in (k8, v8, k_scale, v_scale)], int(table[0, 1])
    new = torch.randn(2, 1, 2, 64).half() * 5
    caches = dict(k_scale=k_scale, v_scale=v_scale)
    load_kernel(spec)(q, k8, v8, table, lens, k_new=new[0], v_new=new[1], num_threads=1, **caches)
    for cache, scale, x in ((k8, k_scale, new[0, 0]), (v8, v_scale, new[1, 0])):
        stored = cache[block, :, 3].float() * scale[block, :, 3].float().unsqueeze(-1)
        assert ((stored - x.float()).abs() <= scale[block, :, 3].float().unsqueeze(-1) * 0.51).all()
    for now, then in zip((k8, v8, k_scale, v_scale), before):
        now[block, :, 3] = then[block, :, 3]
        assert torch.equal(now.float().nan_to_num(), then.float().nan_to_num())


def test_an_edited_kernel_is_loaded_anew(tmp_path: Path) -> None:
    text = (kernel_build.KERNELS_DIR / "scalar.cpp").read_text()
    source = tmp_path / "mine.cpp"
    source.write_text(text)
    spec = KernelSpec(16, 2, 16, "float32", rung=str(source))
    inputs = case(spec, [5])
    check(spec, load_kernel(spec)(*inputs), reference(*inputs))
    source.write_text(text.replace("o[d] / total", "0.f"))
    assert (load_kernel(spec)(*inputs) == 0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_one_openmp_runtime_in_the_process() -> None:
    program = (
        "from neo_lite.cpu_attention import KernelSpec, load_kernel\n"
        "print(load_kernel(KernelSpec(16, 2, 16, 'float32')).description)\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libomp' in line})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    description, runtimes = done.stdout.splitlines()
    assert "OpenMP" in description and len(runtimes.split()) == 1, runtimes


def test_one_small_header_knows_instruction_sets_and_every_rung_is_short() -> None:
    files = {path.name: path.read_text() for path in kernel_build.KERNELS_DIR.glob("*.*")}
    intrinsic = re.compile(r"_mm\d*_|__m\d{3}|\bv\w+_[fsu]\d+\(|intrin\.h|arm_neon\.h|__builtin_ia32|\basm\b")
    assert {name for name, text in files.items() if intrinsic.search(text)} == {"simd.h"}
    assert files["simd.h"].count("\n") < 160
    assert all(files[f"{rung}.cpp"].count("\n") <= 200 for rung in RUNGS)


# ---- Other compilers, other processors, sanitizers: the driver in kernels/check ----
SHAPES = ["-DHEAD_DIM=64 -DGROUP=3 -DBLOCK_SIZE=16", "-DHEAD_DIM=128 -DGROUP=1 -DBLOCK_SIZE=8"]
FORMATS = {"fp16": "-DDTYPE_FLOAT16", "bf16": "-DDTYPE_BFLOAT16", "fp32": "-DDTYPE_FLOAT32",
           "int8": "-DDTYPE_FLOAT16 -DKV_INT8"}  # fmt: skip


def build_driver(folder: Path, compiler: str, flags: str, rung: Path | str) -> str:
    source = rung if isinstance(rung, Path) else kernel_build.KERNELS_DIR / f"{rung}.cpp"
    driver = kernel_build.KERNELS_DIR / "check" / "driver.cpp"
    command = [compiler, "-std=c++17", "-O2", f'-DRUNG="{source}"', f"-I{kernel_build.KERNELS_DIR}", *flags.split()]
    built = subprocess.run([*command, str(driver), "-o", str(folder / "driver")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return str(folder / "driver")


def run_driver(folder: Path, compiler: str, flags: str, *runner: str, rung: str = "flash") -> str:
    done = subprocess.run([*runner, build_driver(folder, compiler, flags, rung)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("numbers", FORMATS)
@pytest.mark.parametrize("compiler", ["g++-11", "c++", "clang++"])
def test_every_compiler_and_x86_instruction_set(tmp_path: Path, compiler: str, numbers: str) -> None:
    require_tool(compiler)
    if platform.machine() != "x86_64":
        pytest.skip("-march names x86 processors")
    flags = f"{SHAPES[0]} {FORMATS[numbers]}" + ("" if compiler == "clang++" else " -fopenmp")  # clang's is not its own
    for isa, march in (("AVX2", "haswell"), ("generic", "x86-64")):
        assert isa in run_driver(tmp_path, compiler, f"-march={march} {flags}")


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_bytes_as_they_are_defined(tmp_path: Path, shape: str) -> None:
    """AVX-512 without the instructions for them; with them they run wherever int8 is tested on this machine."""
    if "avx512bw" not in kernel_build._cpu_flags():
        pytest.skip("this processor has no AVX-512")
    flags = f"-fopenmp -march=skylake-avx512 -DBYTE_PRODUCTS {shape} {FORMATS['int8']}"
    assert run_driver(tmp_path, require_tool("c++"), flags).startswith("AVX-512")


@pytest.mark.slow
@pytest.mark.parametrize("rung,numbers", [("scalar", "fp16"), ("simd", "int8"), *(("flash", name) for name in FORMATS)])
def test_neon_under_emulation(tmp_path: Path, rung: str, numbers: str) -> None:
    compiler = require_tool("aarch64-linux-gnu-g++", "apt install g++-aarch64-linux-gnu")
    emulator = require_tool("qemu-aarch64-static", "apt install qemu-user-static")
    for shape, cpu in zip(SHAPES, ("cortex-a57", "neoverse-n1")):
        flags = f"-fopenmp -static {shape} {FORMATS[numbers]}"
        assert run_driver(tmp_path, compiler, flags, emulator, "-cpu", cpu, rung=rung).startswith("NEON")


@pytest.mark.slow
@pytest.mark.parametrize("rung,numbers", [("scalar", "fp16"), ("simd", "fp16"), ("flash", "fp16"), ("flash", "int8")])
def test_address_and_undefined_behaviour_sanitizers(tmp_path: Path, rung: str, numbers: str) -> None:
    sanitize = "-g -fopenmp -march=native -fsanitize=address,undefined -fno-sanitize-recover=all"
    for shape in SHAPES:
        run_driver(tmp_path, require_tool("c++"), f"{sanitize} {shape} {FORMATS[numbers]}", rung=rung)


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["openmp", "simd", "flash", "with a race"])
def test_thread_sanitizer(tmp_path: Path, rung: Path | str) -> None:
    """With clang's OpenMP, whose Archer tells the sanitizer of barriers (gcc's reports falsely). A seeded race is seen."""
    remedy = "apt install clang-19 libomp-19-dev"
    clang = require_tool("clang++-19", remedy)
    archer = Path(clang).resolve().parents[1] / "lib" / "libarcher.so"
    if not archer.is_file():
        require_tool("libarcher.so", remedy)
    race = rung == "with a race"
    if race:
        text, private = (kernel_build.KERNELS_DIR / "openmp.cpp").read_text(), "    std::vector<float> weights;"
        rung = tmp_path / "race.cpp"
        rung.write_text(text.replace(private, "    static std::vector<float> weights;"))
    flags = f"-g -fopenmp -march=native -fsanitize=thread {SHAPES[0]} {FORMATS['fp16']}"
    program = build_driver(tmp_path, clang, flags, rung)
    settings = os.environ | {"OMP_TOOL_LIBRARIES": str(archer), "TSAN_OPTIONS": "ignore_noninstrumented_modules=1"}
    done = subprocess.run([program], capture_output=True, text=True, env=settings)
    assert ("data race" in done.stderr) == race, done.stderr
    assert race or done.returncode == 0, done.stdout
