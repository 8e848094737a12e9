"""What only a GPU can show; skipped, with that reason, elsewhere. Models are tiny and random, tokens exact in float32."""

from __future__ import annotations

import pytest
import torch
from test_attention import check, paged
from test_pipeline import MODES, SHAPES, generate, hf_greedy, poisoned, tiny_folder

from neo_lite import attention, checkpoint
from neo_lite.attention import View
from neo_lite.config import MODELS, EngineConfig
from neo_lite.kv_cache import KVCache
from neo_lite.model import Llama
from neo_lite.request import Move, Request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SERVED = {"gpu-only": {"triton_decode"}, "simple": {"cpu_kernel_decode"}, "symmetric": {"cpu_kernel_decode"},
          "asymmetric": {"triton_decode", "cpu_kernel_decode"}}  # fmt: skip


def on_gpu(case):
    *tensors, view = case
    moved = View(view.query_lens, view.seq_lens.cuda(), view.block_table.cuda())
    return (*(t.cuda() for t in tensors), moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 4, 128, 16), (3, 3, 64, 8), (2, 1, 80, 16), (1, 8, 96, 32), (1, 1, 256, 16), (2, 2, 16, 4)]
)
@pytest.mark.parametrize("backend", [attention.triton_decode, attention.gathered_decode])
def test_decode_backends_equal_the_reference(backend, shape, dtype):
    kv, group, dim, block = shape
    lens = [1, block, block + 1, 255, 256, 257, 700]
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    check(backend, on_gpu(paged(lens, [1] * len(lens), kv * group, kv, dim, block, dtype)), tolerance)


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


def test_asymmetric_serves_from_both_sides_while_requests_move(tmp_path):
    hf = tiny_folder(tmp_path, {})
    prompts = [[i + 1, i + 2, i + 3] for i in range(12)]
    expected = [hf_greedy(hf, p, 40)[0] for p in prompts]
    for _ in range(3):
        engine = poisoned(load(tmp_path, "cuda"), "asymmetric", block_size=4, gpu_kv_tokens=160, cpu_kv_tokens=800)
        requests = generate(engine, prompts, 40)
        assert [r.output for r in requests] == expected
        served = {e.args["backend"] for e in engine.timeline.events if e.name in ("gpu_attn", "cpu_attn")}
        assert served == SERVED["asymmetric"] and sum(r.num_swaps for r in requests) > 0


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
            for buffer in (stage.qkv, stage.qkv_gpu, stage.out, stage.out_gpu):
                buffer.fill_(torch.nan)
        torch.cuda.synchronize()
        return run(plan)

    engine.executor.run = poisoning
    for _ in range(5):
        assert [r.output for r in generate(engine, prompts, 40)] == first
