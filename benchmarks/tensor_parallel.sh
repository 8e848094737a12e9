#!/bin/sh
# Tensor parallel on two GPUs against one: the shape of Llama-3.1-8B under a decode-heavy load, and that of Llama-3.1-70B,
# GPU-only and NEO. The models are random weights of the exact shapes, in bf16.
#
#   sh benchmarks/tensor_parallel.sh OUT [PYTHON]      OUT/runs.jsonl: one result a line; OUT/log: everything else
#
# What fits: 70B in bf16 is 141.1 GB, 70.6 GB a rank, beside which a card of 141 GB has room for KV of about 400,000 tokens
# (164 KB a token and rank). The pools below are smaller, those of the paper's cards of 80 GB, so that the CPU has a part.
# The decode-heavy load has long contexts, so that reading weights and KV, which two cards share, takes most of the time.
# Threads: all cores but two a GPU. A run that hangs ends at its own limit and costs the others nothing. First, in a
# checkout with the test packages: python -m pytest tests/test_parallel.py -k two_gpus (the same tokens as on one GPU).
# Where a virtual machine's MemTotal grows with use, set NEO_LITE_HOST_MEMORY_GIB to what it may grow to.
# OUT/runs.jsonl becomes data/recorded/tensor_parallel_2xh200.json, which notebook 12 draws.
set -u
out=$1 python=${2:-python3}
mkdir -p "$out"
cores=$(nproc)
threads=$((cores > 8 ? cores - 4 : cores))
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
decode_heavy="--model random:llama-3.1-8b --dtype bfloat16 --workload synthetic:12000,2000 --requests 48 --gpu-kv-tokens 690000"
decode_heavy="$decode_heavy --max-batched-tokens 8192"  # or launching the prefills takes longer than computing them on two
little_kv="--model random:llama-3.1-8b --dtype bfloat16 --workload synthetic:600,200 --requests 160 --gpu-kv-tokens 40000"
large="--model random:llama-3.1-70b --dtype bfloat16 --workload synthetic:600,200 --requests 120 --gpu-kv-tokens 40000"

run() { # seconds at most, ranks, arguments
    limit=$1 ranks=$2
    shift 2
    launch="-m"
    [ "$ranks" -gt 1 ] && launch="-m torch.distributed.run --standalone --nproc-per-node $ranks -m"
    echo "$(date +%T) $ranks: $*" >>"$out/log"
    # shellcheck disable=SC2086
    timeout "$limit" "$python" $launch neo_lite bench "$@" --tensor-parallel "$ranks" --cpu-threads "$threads" \
        --cpu-kv-gib 24 --json >>"$out/runs.jsonl" 2>>"$out/log" || echo "exit code $?" >>"$out/log"
}

# shellcheck disable=SC2086
{
    run 180 1 $decode_heavy --mode gpu-only
    run 240 2 $decode_heavy --mode gpu-only,neo
    run 150 2 $large --mode gpu-only,neo
    run 90 2 $little_kv --mode gpu-only,neo
    run 90 1 $little_kv --mode gpu-only,neo
}
cat "$out/log"
