"""What only a GPU can show; skipped, with that reason, elsewhere. Models are tiny and random, tokens exact in float32."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT
from test_attention import check, paged
from test_pipeline import (
    MODES,
    PLACEMENTS,
    PROMPTS,
    SHAPES,
    assert_placed,
    generate,
    hf_greedy,
    placed,
    poisoned,
    tiny_folder,
)  # fmt: skip

from neo_lite import attention, checkpoint
from neo_lite.__main__ import main
from neo_lite.api import build_engine, load_model
from neo_lite.attention import View
from neo_lite.config import MODELS, EngineConfig, NeoLiteError
from neo_lite.cpu_attention import CompilerMissing
from neo_lite.kv_cache import KVCache
from neo_lite.model import Llama, rotate, swiglu
from neo_lite.request import Move, Request, SamplingParams

gpu_kernels = pytest.importorskip("neo_lite.gpu_kernels", reason="needs Triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# The whole file also passes as on a T4, with NEO_LITE_ASSUME=sm75: no Triton, no CUDA graphs, no flash kernel.
OLD = os.environ.get("NEO_LITE_ASSUME") == "sm75" or (
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
)
ON_GPU = "gathered_decode" if OLD else "triton_decode"
SERVED = {"gpu-only": {ON_GPU}, "simple": {"cpu_kernel_decode"}, "symmetric": {"cpu_kernel_decode"},
          "asymmetric": {ON_GPU, "cpu_kernel_decode"}}  # fmt: skip
new_gpu = pytest.mark.skipif(OLD, reason="Triton and CUDA graphs serve compute capability 8.0 and up")


def on_gpu(case):
    *tensors, view = case
    moved = View(view.query_lens, view.seq_lens.cuda(), view.block_table.cuda())
    return (*(t.cuda() for t in tensors), moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 4, 128, 16), (3, 3, 64, 8), (2, 1, 80, 16), (1, 8, 96, 32), (1, 1, 256, 16), (2, 2, 16, 4)]
)
@pytest.mark.parametrize("backend", [pytest.param(attention.triton_decode, marks=new_gpu), attention.gathered_decode])
def test_decode_backends_equal_the_reference(backend, shape, dtype):
    if OLD and dtype == torch.bfloat16:
        pytest.skip("no bfloat16 below compute capability 8.0")
    kv, group, dim, block = shape
    lens = [1, block, block + 1, 255, 256, 257, 700]
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    check(backend, on_gpu(paged(lens, [1] * len(lens), kv * group, kv, dim, block, dtype)), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("queries, lens", [([40, 1, 7], [40, 1, 7]), ([40, 1, 7, 30], [140, 33, 7, 31])])
@pytest.mark.parametrize("shape", [(2, 4, 128, 16), (3, 1, 64, 8), (2, 2, 16, 4)])
def test_prefill_equals_the_reference(shape, queries, lens, dtype):
    kv, group, dim, block = shape
    case = on_gpu(paged(lens, queries, kv * group, kv, dim, block, dtype))
    check(attention.prefill, case, {torch.float32: 1e-5, torch.float16: 2e-3}[dtype])


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_swaps_between_gpu_and_pinned_memory(target):
    cache = KVCache(
        MODELS["tiny"],
        EngineConfig(block_size=4, gpu_kv_tokens=32, cpu_kv_tokens=48),
        torch.float16,
        torch.device("cuda"),
    )
    source, to = (cache.pools[p] for p in (("gpu", "cpu") if target == "cpu" else ("cpu", "gpu")))
    source.k.copy_(torch.randn(source.k.shape))
    cache.swap(Move(Request(0, (1,)), target, (5, 1, 3), (2, 7, 0)))
    torch.cuda.synchronize()
    for a, b in zip((5, 1, 3), (2, 7, 0), strict=True):
        assert torch.equal(to.k[:, b].cpu(), source.k[:, a].cpu())


@pytest.mark.parametrize("pool, kv_dtype", [("gpu", "auto"), ("cpu", "auto"), ("cpu", "int8")])
@pytest.mark.parametrize("heads, dim", [(8, 128), (3, 80)])
def test_new_keys_and_values_are_stored_as_on_the_host(heads, dim, pool, kv_dtype):
    """Parts of a fused projection, whose tokens lie apart, against the same pool filled by torch on the host."""
    model = dataclasses.replace(MODELS["tiny"], num_kv_heads=heads, head_dim=dim)
    config = EngineConfig(block_size=4, gpu_kv_tokens=64, cpu_kv_tokens=64, cpu_kv_dtype=kv_dtype)
    both = [KVCache(model, config, torch.float16, torch.device(d)).pools[pool] for d in ("cuda", "cpu")]
    qkv = torch.randn(11, 3 * heads, dim, dtype=torch.float16, device="cuda")
    _, k, v = qkv.split(heads, dim=1)
    places = torch.from_numpy(both[0].places(np.random.default_rng(0).permutation(64)[:11]))
    both[0].put(1, k, v, places.cuda())
    both[1].put(1, k.cpu(), v.cpu(), places)
    torch.cuda.synchronize()
    for name, tensor in both[1].tensors.items():
        assert torch.equal(both[0].tensors[name].cpu(), tensor), name


@new_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, others, dim", [(40, 8, 128), (3, 1, 80), (6, 2, 24)])
def test_rope_and_swiglu_in_one_kernel_each(heads, others, dim, dtype):
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    x = torch.randn(37, heads + others, dim, dtype=dtype, device="cuda")
    half = torch.randn(2, 37, 1, dim // 2, device="cuda")
    rope = tuple(torch.cat((t, t), -1).to(dtype) for t in half)
    exact, before = rotate(x[:, :heads].double(), tuple(t.double() for t in rope)), x.clone()
    assert (gpu_kernels.rotate(x[:, :heads], rope) - exact).norm() <= tolerance * exact.norm()
    assert torch.equal(x[:, heads:], before[:, heads:]), "the other heads stay as they are"
    gate_up = torch.randn(37, 2 * 1100, dtype=dtype, device="cuda")
    exact = swiglu(gate_up.double())
    assert (gpu_kernels.swiglu(gate_up) - exact).norm() <= tolerance * exact.norm()


def load(folder, device, dtype=torch.float32) -> Llama:
    opened = checkpoint.open_checkpoint(str(folder))
    return Llama(opened.config, dtype, torch.device(device)).load(opened)


@pytest.mark.parametrize("kind", SHAPES)
def test_tokens_equal_transformers_in_every_mode(tmp_path, kind):
    hf = tiny_folder(tmp_path, SHAPES[kind])
    model = load(tmp_path, "cuda")
    prompts = [[5], [7, 8, 9], list(range(1, 40))]
    expected = [hf_greedy(hf, p, 24)[0] for p in prompts]
    for mode in MODES:
        for changes in ({}, {"block_size": 4, "gpu_kv_tokens": 100, "cpu_kv_tokens": 100, "max_batched_tokens": 8}):
            engine = poisoned(model, mode, **changes)
            assert [r.output for r in generate(engine, prompts, 24)] == expected, (mode, changes)
            served = {e.args["backend"] for e in engine.timeline.events if e.name in ("gpu_attn", "cpu_attn")}
            assert served and served <= SERVED[mode]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tokens_are_the_same_wherever_kv_lies(tmp_path, placement, monkeypatch):
    """Recorded, hence eagerly; then without a timeline, hence in CUDA graphs where those serve."""
    monkeypatch.setattr("neo_lite.graphs.EAGER", 1)  # so few iterations repeat no sizes five times
    hf = tiny_folder(tmp_path, {})
    prompts = PLACEMENTS[placement][-1]
    expected = [hf_greedy(hf, p, 10 + 2 * i)[0] for i, p in enumerate(prompts)]
    for record in (True, False):
        for _ in range(3):
            engine, requests, directions = placed(load(tmp_path, "cuda"), placement, record)
            assert [r.output for r in requests] == expected
            assert_placed(engine, placement, requests, directions)
        if record:
            served = {e.args["backend"] for e in engine.timeline.events if e.name in ("gpu_attn", "cpu_attn")}
            assert served == SERVED[PLACEMENTS[placement][0]]
        elif not OLD:
            assert engine.executor.graphs.captured, "no combination of sizes came twice: the test shows nothing"


@new_gpu
@pytest.mark.parametrize("early", [True, False], ids=["early nodes", "plain nodes"])
@pytest.mark.parametrize("mode", MODES)
def test_graphs_give_the_tokens_of_eager_iterations(tmp_path, monkeypatch, mode, early):
    """In fp16, where the same kernels give the same bits; lengths that cross tiles, splits and block tables."""
    monkeypatch.setattr("neo_lite.streams.has_stream_words", lambda: early)
    tiny_folder(tmp_path, {"num_hidden_layers": 12, "max_position_embeddings": 1024})
    model = load(tmp_path, "cuda", torch.float16)
    prompts = [[(7 * i + j) % 90 + 1 for j in range(n)] for i, n in enumerate((3, 60, 250, 255, 300, 500, 511, 700))]
    outputs = []
    for graphs in (True, False):
        engine = poisoned(model, mode, gpu_kv_tokens=3000, cpu_kv_tokens=4000)
        engine.timeline.enabled = False
        if not graphs:
            engine.executor.graphs = None
        outputs.append([r.output for r in generate(engine, prompts, 30)])
        if graphs:
            assert engine.executor.graphs.captured
    assert outputs[0] == outputs[1]


def test_half_precision_errs_no_more_than_twice_transformers_own(tmp_path):
    hf = tiny_folder(tmp_path, {})
    prompt = list(range(1, 60))
    exact = hf_greedy(hf, prompt, 1)[1]
    theirs = (hf_greedy(hf.half().cuda(), torch.tensor(prompt).tolist(), 1, "cuda")[1].cpu() - exact).norm()
    for mode in MODES:
        engine = poisoned(load(tmp_path, "cuda", torch.float16), mode)
        logits = []
        inner = engine.executor.sample
        engine.executor.sample = lambda x, r, inner=inner, keep=logits: keep.append(x.cpu()) or inner(x, r)
        generate(engine, [prompt], 1)
        assert (logits[0][0] - exact[0]).norm() <= 2 * theirs


def test_staging_buffers_carry_no_other_layers_data(tmp_path):
    """Every buffer is poisoned between iterations; many iterations with a deep model, small enough to race."""
    tiny_folder(tmp_path, {"num_hidden_layers": 24})
    model = load(tmp_path, "cuda")
    prompts = [[i + 1, i + 2, i + 3] for i in range(16)]
    first = [r.output for r in generate(poisoned(model, "simple"), prompts, 40)]
    engine = poisoned(model, "simple")
    engine.timeline.enabled = False
    run = engine.executor.run

    def poisoning(plan):
        for stage in engine.executor.streams.staging:
            for buffer in (stage.qkv, stage.out, stage.out_gpu):
                buffer.fill_(torch.nan)
        torch.cuda.synchronize()
        return run(plan)

    engine.executor.run = poisoning
    for _ in range(5):
        assert [r.output for r in generate(engine, prompts, 40)] == first


# ---- What can go wrong ----


def test_pools_that_do_not_fit_are_refused(tmp_path):
    tiny_folder(tmp_path, {})
    with pytest.raises(NeoLiteError, match="gpu KV pool of .* would fit"):
        build_engine(load(tmp_path, "cuda"), gpu_kv_tokens=2**31)
    assert main(["bench", "--model", "random:tiny", "--num-sms", "4096"]) == 1


def test_a_mode_that_needs_the_kernel_on_a_stream_says_which_do_not(tmp_path, monkeypatch):
    def missing(*_):
        raise CompilerMissing("no C++ compiler: 'c++' does not run; install g++ or set CXX")

    monkeypatch.setattr(attention, "kernel_for", missing)
    hf = tiny_folder(tmp_path, {})
    model = load(tmp_path, "cuda")
    with pytest.raises(NeoLiteError, match="mode symmetric needs .* install g.* this machine runs gpu-only, .*simple"):
        build_engine(model, mode="symmetric")
    with pytest.warns(UserWarning, match="torch computes CPU attention"):
        engine = build_engine(model, mode="simple")
    assert generate(engine, [[3, 4, 5]], 12)[0].output == hf_greedy(hf, [3, 4, 5], 12)[0]


def test_out_of_memory_in_an_iteration_leaves_the_process_able(tmp_path, monkeypatch):
    """The real error of a real allocation; then the same engine, and a new one, go on."""
    tiny_folder(tmp_path, {})
    model = load(tmp_path, "cuda")
    head = model.head
    expected = generate(build_engine(model), [[3, 4, 5]], 8)[0].output
    for mode in MODES:
        engine = build_engine(model, mode=mode, max_seqs=1)
        first, second = (engine.add([3, 4, 5], SamplingParams(8, ignore_eos=True)) for _ in range(2))
        monkeypatch.setattr(model, "head", lambda x: torch.empty(1 << 45, dtype=torch.uint8, device="cuda"))
        with pytest.raises(NeoLiteError, match="memory does not suffice"):
            engine.step()
        monkeypatch.setattr(model, "head", head)
        assert (first.finish_reason, second.finish_reason) == ("failed", None)
        engine.run()
        assert second.output == expected
        assert generate(build_engine(model, mode=mode), [[3, 4, 5]], 8)[0].output == expected


def test_an_iteration_that_breaks_off_between_a_call_and_its_result_leaves_no_trace(tmp_path, monkeypatch):
    """Later calls at the same place wait for their own results, not for that one."""
    hf = tiny_folder(tmp_path, {})
    engine = build_engine(load(tmp_path, "cuda"), mode="simple", max_seqs=1)
    engine.timeline.enabled = False
    first, second = (engine.add([3, 4, 5], SamplingParams(24, ignore_eos=True)) for _ in range(2))
    for _ in range(3):
        engine.step()
    pipeline = engine.executor

    def broken(*_):
        raise torch.OutOfMemoryError("as if")

    monkeypatch.setattr(pipeline, "_gpu_attention", broken)
    with pytest.raises(NeoLiteError, match="memory does not suffice"):
        engine.step()
    monkeypatch.undo()
    assert first.finish_reason == "failed"
    engine.run()
    assert second.output == hf_greedy(hf, [3, 4, 5], 24)[0]


@new_gpu
@pytest.mark.parametrize("early", [True, False], ids=["early nodes", "plain nodes"])
@pytest.mark.parametrize("mode", ["gpu-only", "asymmetric"])
def test_an_interrupt_amid_a_capture_loses_nothing(tmp_path, monkeypatch, mode, early):
    monkeypatch.setattr("neo_lite.streams.has_stream_words", lambda: early)
    monkeypatch.setattr("neo_lite.graphs.EAGER", 1)
    hf = tiny_folder(tmp_path, {"num_hidden_layers": 6})
    prompts = [[3, 4, 5], [6, 7], [8], [9, 10]]
    engine = build_engine(load(tmp_path, "cuda"), mode=mode, gpu_kv_tokens=160 if mode == "gpu-only" else 64)
    engine.timeline.enabled = False
    requests = [engine.add(p, SamplingParams(24, ignore_eos=True)) for p in prompts]
    model, inner, interrupts = engine.executor.model, engine.executor.model.post_attention, []

    def interrupted(layer, *rest):
        if torch.cuda.is_current_stream_capturing() and layer == 4 and len(interrupts) < 2:
            interrupts.append(layer)
            raise KeyboardInterrupt
        return inner(layer, *rest)

    monkeypatch.setattr(model, "post_attention", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    engine.run()
    assert [r.output for r in requests] == [hf_greedy(hf, p, 24)[0] for p in prompts]
    assert engine.executor.graphs.captured


DEVICE_ASSERT = "torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')]"
ILLEGAL_ACCESS = "write[(1,)](torch.zeros(1, device='cuda'), 1 << 42)"
PROGRAM = """
import sys, torch
from neo_lite import model
from neo_lite.__main__ import main
if {triton}:
    import triton, triton.language as tl
    @triton.jit
    def write(pointer, far):
        tl.store(pointer + far, 1.0)
inner = model.Llama.post_attention
def broken(self, layer, attn, x):
    {cause}
    return inner(self, layer, attn, x)
model.Llama.post_attention = broken
sys.exit(main(["generate", "--model", "random:tiny", "--device", "cuda", "--prompt", "abc", "--mode", "{mode}"]))
"""


@pytest.mark.parametrize("cause", [DEVICE_ASSERT, pytest.param(ILLEGAL_ACCESS, marks=new_gpu)])
@pytest.mark.parametrize("mode", ["gpu-only", "simple"])
def test_a_failed_gpu_ends_in_one_line(tmp_path, cause, mode):
    program = tmp_path / "broken.py"
    program.write_text(PROGRAM.format(cause=cause, mode=mode, triton=cause == ILLEGAL_ACCESS))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=120)
    told = [line for line in done.stderr.splitlines() if line.startswith("neo_lite: the ")]
    assert done.returncode == 1, done.stderr
    assert len(told) == 1 and "requests in flight have failed; restart the process" in told[0], done.stderr
    assert "Traceback" not in done.stderr


# ---- SmolLM2, trained weights ----


@pytest.mark.slow
def test_smollm2_in_every_mode_and_with_requests_that_move():
    """Greedy, fp32: transformers' reading of the same file."""
    try:
        model = load_model("smollm2", "cuda", "float32")
    except NeoLiteError as error:
        pytest.skip(str(error))
    path = checkpoint.open_checkpoint("smollm2").path
    hf = transformers.LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).cuda()
    prompts = [model.tokenizer.encode(p) for p in PROMPTS]
    expected = [hf_greedy(hf.eval(), p, 64, "cuda")[0] for p in prompts]
    for mode in MODES:
        home, other = ("gpu", "cpu") if mode in ("gpu-only", "asymmetric") else ("cpu", "gpu")
        for pools in ({}, {f"{home}_kv_tokens": 400, f"{other}_kv_tokens": 300}):
            for record in (True, False):
                engine = poisoned(model, mode, **pools)
                engine.timeline.enabled = record
                requests = generate(engine, prompts, 64)
                assert [r.output for r in requests] == expected, (mode, pools, record)
                assert not pools or sum(r.num_swaps for r in requests) >= 2
