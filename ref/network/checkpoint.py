"""Checkpoints as Hugging Face folders, so that `AutoModelForCausalLM.from_pretrained` opens the result of a
run.

    config.json               of Qwen3-MoE, Qwen3, Qwen2 or Llama (`FAMILIES`)
    model.safetensors         or model-00001-of-0000N.safetensors, ... and model.safetensors.index.json
    mtp/model.safetensors     tensors of a run that are no part of the family: multi-token-prediction layers. They need
                              their own folder: vLLM loads every *.safetensors next to the weights into the network
    tokenizer.json, ...       all other files of the folder are kept when it is overwritten

On disk every expert has its own three matrices, as in the published checkpoints; in memory a layer's experts
are two tensors. `tensor_parts` maps between the two, in both directions. This file handles names, shapes and
files. The network itself is in `ref/network/model.py`; use its `load_hf` and `save_hf`.
"""

import ctypes
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ref.checks import parse_json

__all__ = ["CheckpointError", "load_extra", "read_config", "read_tensors", "write_checkpoint"]


class CheckpointError(ValueError):
    """One line that says which file or tensor of a checkpoint is wrong, and how."""


MAX_JSON_BYTES = 256 << 20
"""Upper bound of a JSON file: the index of the largest open models has some 10 MB."""


# ----------------------------------------------------------------------------------------- config.json


class Family(NamedTuple):
    """What sets a `model_type` apart."""

    architecture: str
    """The class of transformers."""
    moe: bool
    """Its layers are mixtures of experts."""
    qk_norm: bool
    """Queries and keys have a norm."""
    attention_bias: bool
    """Queries, keys and values have a bias."""
    title: str
    """What people call it."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", False, False, False, "Llama"),
    "qwen2": Family("Qwen2ForCausalLM", False, False, True, "Qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", False, True, False, "Qwen3, dense"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", True, True, False, "Qwen3-MoE"),
}


def family(fields: Mapping) -> str:
    """The model_type of a network with these fields of `ref.network.model.Config`. Raises ValueError if no family is
    so."""
    features = fields["num_experts"] > 0, fields["qk_norm"], fields["attention_bias"]
    for model_type, kind in FAMILIES.items():
        if (kind.moe, kind.qk_norm, kind.attention_bias) == features:
            return model_type
    moe, qk_norm, bias = ("with" if has_feature else "without" for has_feature in features)
    raise ValueError(
        f"qk_norm and attention_bias must fit a family: none is {moe} experts, {qk_norm} qk_norm and "
        f"{bias} attention_bias"
    )


SHAPE_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
MOE_FIELDS = ("num_experts_per_tok", "moe_intermediate_size")
OTHER_FIELDS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
MOE_OTHER_FIELDS = {"norm_topk_prob": False, "router_aux_loss_coef": 0.001}
LLAMA_OTHER_FIELDS = {"max_position_embeddings": 2048}
"""Defaults of transformers for fields missing from config.json."""
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Type of RoPE scaling → what transformers cannot do without."""
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}
"""Type of RoPE scaling → fields of `ref.network.rope.RopeScaling` that it reads."""
POSITIVE = (*SHAPE_FIELDS, *MOE_FIELDS, "head_dim", "intermediate_size", "max_position_embeddings", "sliding_window")
POSITIVE += ("original_max_position_embeddings",)
ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
KINDS = {
    "a positive whole number": (POSITIVE, lambda x: type(x) is int and x > 0),
    "a whole number": (
        ("num_experts", "num_local_experts", "max_window_layers", "decoder_sparse_step"),
        lambda x: type(x) is int and x >= 0,
    ),
    "a number": (
        ("rms_norm_eps", "initializer_range", "router_aux_loss_coef", "rope_theta", *ROPE_NUMBERS),
        lambda x: type(x) in (int, float) and 0 <= x < float("inf"),
    ),
    "true or false": (
        ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "mlp_bias", "use_sliding_window", "truncate"),
        lambda x: type(x) is bool,
    ),
    "an object": (("rope_scaling", "rope_parameters"), lambda x: isinstance(x, dict)),
    "a list": (("layer_types", "mlp_only_layers"), lambda x: isinstance(x, list)),
}
"""Kind of value → the fields that must have it unless missing or null, and the test for it."""


def write_config(fields: Mapping, dtype: torch.dtype) -> str:
    """The text of config.json for the fields of `ref.network.model.Config`."""
    model_type, moe = family(fields), fields["num_experts"] > 0
    names = [*SHAPE_FIELDS, "head_dim", "intermediate_size", *OTHER_FIELDS]
    names += ["num_experts", *MOE_FIELDS, *MOE_OTHER_FIELDS] if moe else []
    scaling = fields["rope_scaling"]
    rope = {
        name: scaling[name] for name in ("rope_type", *ROPE_FIELDS[scaling["rope_type"]]) if scaling[name] is not None
    }
    record = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "attention_bias": fields["attention_bias"],
        "use_sliding_window": False,
        # transformers 5 reads the first of each pair, transformers 4 the second.
        "rope_parameters": {**rope, "rope_theta": fields["rope_theta"]},
        "rope_theta": fields["rope_theta"],
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{name: fields[name] for name in names},
    }
    if len(rope) > 1:
        record |= {"rope_scaling": rope}
    if moe:
        record |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return json.dumps(record, indent=2, sort_keys=True) + "\n"


def read_config(folder: Path) -> dict:
    """The fields of `ref.network.model.Config` from a folder's config.json; `rope_scaling` as a mapping.

    Raises CheckpointError if there is no config.json, if a field that gives a shape is missing, if a field has
    the wrong kind of value, and if the checkpoint needs a feature that this network does not have."""
    path = Path(folder) / "config.json"
    record = read_json(path)
    kind = record.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{path}: model_type {kind!r} is not supported, only {', '.join(FAMILIES)}")
    check_kinds(path, record)
    refuse_unsupported(path, record)
    if kind == "llama" and record.get("num_key_value_heads") is None:
        record["num_key_value_heads"] = record.get("num_attention_heads")
    experts = record.get("num_experts", record.get("num_local_experts", 0)) or 0 if kind == "qwen3_moe" else 0
    required = [*SHAPE_FIELDS, *(MOE_FIELDS if experts else ["intermediate_size"])]
    if missing := [name for name in required if record.get(name) is None]:
        raise CheckpointError(f"{path}: {', '.join(missing)} missing")
    fields = {name: record[name] for name in required}
    # Of all families, only Qwen3's heads have a default width.
    heads = (
        128 if kind == "qwen3" and "head_dim" not in record else record["hidden_size"] // record["num_attention_heads"]
    )
    fields |= {"head_dim": record.get("head_dim") or heads, "num_experts": experts}
    fields |= {"qk_norm": FAMILIES[kind].qk_norm, "attention_bias": FAMILIES[kind].attention_bias}
    soft = OTHER_FIELDS | (MOE_OTHER_FIELDS if experts else {}) | (LLAMA_OTHER_FIELDS if kind == "llama" else {})
    if record.get("intermediate_size"):
        fields["intermediate_size"] = record["intermediate_size"]
    fields |= {name: default if record.get(name) is None else record[name] for name, default in soft.items()}
    fields["rope_theta"] = float(rope_of(record).get("rope_theta") or record.get("rope_theta") or 10_000.0)
    return fields | {"rope_scaling": read_scaling(path, record, fields["max_position_embeddings"])}


def rope_of(record: Mapping) -> dict:
    """The settings of the rotary embedding. Where both spellings are there, transformers takes the older one."""
    return record.get("rope_scaling") or record.get("rope_parameters") or {}


def rope_type_of(rope: Mapping):
    return rope.get("rope_type", rope.get("type", "default"))


def read_scaling(path: Path, record: Mapping, longest: int) -> dict:
    """The fields of `ref.network.rope.RopeScaling`, with the defaults of transformers. `longest`:
    max_position_embeddings."""
    rope = {name: value for name, value in rope_of(record).items() if value is not None}
    kind = rope_type_of(rope)
    # YaRN's factor may be null: it is the ratio of the two lengths then
    available_fields = rope_of(record) if kind == "yarn" else rope
    if missing := [name for name in ROPE_NEEDS[kind] if name not in available_fields]:
        raise CheckpointError(f"{path}: {', '.join(missing)} missing from the rope scaling of type {kind!r}")
    original = record.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    if kind == "yarn":
        factor = rope.setdefault("factor", longest / original)
        scales = [rope[name] for name in ("mscale", "mscale_all_dim") if rope.get(name)]
        if "attention_factor" not in rope and len(scales) == 2:  # DeepSeek's form of the same number
            above, below = (0.1 * scale * math.log(max(factor, 1.0)) + 1.0 for scale in scales)
            rope["attention_factor"] = above / below
        for name in ("beta_fast", "beta_slow"):
            if not rope.get(name):
                rope.pop(name, None)
        rope["truncate"] = bool(rope_of(record).get("truncate", True))
    rope["original_max_position_embeddings"] = original
    scaling_fields = {name: rope[name] for name in ROPE_FIELDS[kind] if name in rope}
    return {
        "rope_type": kind,
        **{
            name: float(value) if type(value) is int and name in ROPE_NUMBERS else value
            for name, value in scaling_fields.items()
        },
    }


def check_kinds(path: Path, record: Mapping) -> None:
    """Raise CheckpointError for the first field with the wrong kind of value: "false" in quotes would count as true."""
    for kind, (names, fits) in KINDS.items():
        for name in names:
            for section in ("", "rope_parameters", "rope_scaling"):
                holder = record.get(section) if section else record
                value = holder.get(name) if isinstance(holder, dict) else None
                if value is not None and not fits(value):
                    raise CheckpointError(f"{path}: {section and section + '.'}{name} must be {kind}; got {value!r}")


def refuse_unsupported(path: Path, record: Mapping) -> None:
    """Raise CheckpointError for a feature that would silently change the logits if it were ignored."""
    rope, kind = rope_of(record), record["model_type"]
    rope_type = rope_type_of(rope)
    layers = record.get("num_hidden_layers") or 0
    window = record.get("sliding_window") if record.get("use_sliding_window") else None
    first_window = record.get("max_window_layers", 0) if kind in ("qwen2", "qwen3") else 0
    sliding = window is not None and first_window < layers
    if "layer_types" in record and record["layer_types"] is not None:
        sliding = any(layer != "full_attention" for layer in record["layer_types"])
    unsupported = {
        f"rope scaling of type {rope_type!r}": not isinstance(rope_type, str) or rope_type not in ROPE_FIELDS,
        "a rotary embedding for each type of layer": any(isinstance(value, dict) for value in rope.values()),
        "partial rotary embedding": rope.get("partial_rotary_factor", record.get("partial_rotary_factor", 1))
        not in (1, None),
        "attention_bias": kind != "qwen2"
        and record.get("attention_bias"),  # Qwen2 has its own, whatever this field says
        "mlp_bias": record.get("mlp_bias"),
        "sliding-window attention": sliding,
        f"hidden_act {record.get('hidden_act')!r}": record.get("hidden_act", "silu") != "silu",
        "a quantized checkpoint": record.get("quantization_config"),
        "mlp_only_layers": record.get("mlp_only_layers"),
        "decoder_sparse_step other than 1": record.get("decoder_sparse_step", 1) != 1,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise CheckpointError(f"{path}: {feature} is not supported")


def read_json(path: Path) -> dict:
    if path.exists() and not path.is_dir() and not (path.is_file() and path.stat().st_size <= MAX_JSON_BYTES):
        raise CheckpointError(f"{path} must be a file of at most {MAX_JSON_BYTES:,} bytes")
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} is damaged: it must hold one JSON object")
    return record


# ---------------------------------------------------------------------------------------------- tensors


def disk_name(name: str) -> str:
    """The Hugging Face name of a parameter of the network."""
    if name.startswith("lm_head."):
        return name
    return "model." + re.sub(r"\.mlp\.(gate_up_proj|down_proj)$", r".mlp.experts.\1", name)


def tensor_parts(name: str, shape: tuple[int, ...]) -> dict[str, tuple]:
    """Hugging Face name → index into the parameter `name`: the parameter itself, or one entry per expert and matrix."""
    layer, _, last = disk_name(name).rpartition(".")
    if last == "gate_up_proj":
        half = shape[1] // 2
        split = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
        return {f"{layer}.{e}.{part}.weight": (e, rows) for e in range(shape[0]) for part, rows in split.items()}
    if last == "down_proj":
        return {f"{layer}.{e}.down_proj.weight": (e,) for e in range(shape[0])}
    return {disk_name(name): ()}


def read_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the parameters of the given names and shapes. On disk, experts may be fused or separate, and a tied
    head may be stored or not.

    Every file is opened once, and no tensor is held twice. Raises a CheckpointError that names the file or tensor
    that is missing, damaged, unexpected or of the wrong shape."""
    folder = Path(folder)
    files, places, tied = matched(folder, shapes)
    state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    for file in sorted({files[part] for part in places}):
        for part, tensor in read_file(folder / file, [part for part in places if files[part] == file]):
            name, index = places[part]
            fit(state[name][index], tensor, folder / file, part)
    if tied:
        [(_, head)] = read_file(folder / files["lm_head.weight"], ["lm_head.weight"])
        check_tied(folder, head, state["embed_tokens.weight"])
    return state


def matched(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], dict[str, tuple[str, tuple]], bool]:
    """Where a folder holds the parameters of these shapes: tensor on disk → file, tensor on disk → (parameter, index
    into it), and whether a head that is tied to the embedding is also stored. Raises CheckpointError as `read_tensors`
    does."""
    files = locate(folder)
    tied = "lm_head.weight" not in shapes and "lm_head.weight" in files
    places: dict[str, tuple[str, tuple]] = {}
    for name, shape in shapes.items():
        fused = disk_name(name)
        parts = {fused: ()} if fused in files else tensor_parts(name, shape)
        places |= {part: (name, index) for part, index in parts.items()}
    if missing := [part for part in places if part not in files]:
        raise CheckpointError(f"{folder}: tensor {missing[0]} missing{count_rest(missing)}")
    spare = [part for part in files if part not in places and not (tied and part == "lm_head.weight")]
    if spare := [part for part in spare if not part.endswith("rotary_emb.inv_freq")]:
        raise CheckpointError(
            f"{folder}: tensor {spare[0]} in {files[spare[0]]} does not belong to this network{count_rest(spare)}"
        )
    return files, places, tied


def fit(target: Tensor, tensor: Tensor, path: Path, part: str) -> None:
    """Copy a tensor from disk into its place. Raises CheckpointError if its shape differs, if it does not hold floats
    of 16 bits or more (numbers of 8 bits are quantised, and mean nothing without their scales), or if a weight is NaN
    or infinite."""
    if target.shape != tensor.shape or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise CheckpointError(
            f"{path}: tensor {part} must hold floats of shape {list(target.shape)}; got {tensor.dtype} "
            f"of shape {list(tensor.shape)}"
        )
    target.copy_(check_finite(tensor, path, part))


def check_finite(tensor: Tensor, path: Path, part: str) -> Tensor:
    """The tensor itself. Raises CheckpointError if a weight is NaN or infinite."""
    # The extremes of a tensor with a NaN are NaN, and no mask as large as the tensor is made.
    if tensor.numel() and not all(bool(extreme.isfinite()) for extreme in tensor.aminmax()):
        raise CheckpointError(f"{path}: tensor {part} holds weights that are NaN or infinite; get the file again")
    return tensor


def check_tied(folder: Path, head: Tensor, embedding: Tensor) -> None:
    """Raise CheckpointError unless a stored head, or a part of it, equals that of the embedding that it is tied to."""
    if not torch.equal(head.to(embedding.dtype), embedding):
        raise CheckpointError(
            f"{folder}: config.json ties the head to the embedding, but lm_head.weight differs from it"
        )


def count_rest(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def locate(folder: Path) -> dict[str, str]:
    """Tensor name → file, from the index or from the only file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists() or not index.exists():
        if not single.exists():
            raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        with open_safetensors(single) as file:
            return dict.fromkeys(file.keys(), single.name)
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in files.values()
    ):
        raise CheckpointError(f"{index} is damaged: weight_map must give a file name for every tensor")
    for file in sorted(set(files.values())):
        if not (folder / file).exists():
            raise CheckpointError(f"{folder / file} is missing, but {index.name} names it")
    return files


def open_safetensors(path: Path):
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated ({error})") from None


def read_file(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    with open_safetensors(path) as file:
        stored_names = set(file.keys())
        for name in names:
            if name not in stored_names:
                raise CheckpointError(f"{path} has no tensor {name}, but the index says it does")
            yield name, file.get_tensor(name)


EXTRA, EARLIER = Path("mtp") / "model.safetensors", ("extra.safetensors", "mtp.safetensors")
"""Where a folder stores extra tensors, and where earlier versions stored them."""
CHECKPOINT_FILES = re.compile(
    r"config\.json|(extra|mtp)\.safetensors|model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json"
)
"""Files that a new checkpoint replaces."""


def load_extra(folder: str | Path) -> dict[str, Tensor]:
    """The tensors given to `save_hf` as `extra`; empty if there were none."""
    for path in (Path(folder) / name for name in (EXTRA, *EARLIER)):
        if path.exists():
            with open_safetensors(path) as file:
                return {name: file.get_tensor(name) for name in file.keys()}
    return {}


# ---------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    folder: str | Path,
    fields: Mapping,
    state: Mapping[str, Tensor],
    max_shard_bytes: int,
    extra: Mapping[str, Tensor] | None,
    sidecar_files: Mapping[str, bytes] | None,
) -> None:
    """Write all files into a neighbouring folder `.NAME.saving`, flush them to disk, then swap the two folders. A
    process killed at any moment leaves the old checkpoint or the new one, complete. Other files of the old folder
    are kept."""
    folder, fresh = prepare_folder(folder, sidecar_files or ())
    shards = split_shards(state, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    index, total = {}, 0
    for file, shard in zip(names, shards, strict=True):
        tensors = {
            part: state[name].detach()[part_index].contiguous().cpu() for part, (name, part_index) in shard.items()
        }
        total += sum(tensor.nbytes for tensor in tensors.values())
        index |= dict.fromkeys(tensors, file)
        save_file(tensors, fresh / file, metadata={"format": "pt"})
    if len(shards) > 1:
        write_index(fresh, index, total)
    finish_folder(folder, fresh, fields, next(iter(state.values())).dtype, extra, sidecar_files)


def finish_folder(
    folder: Path,
    fresh: Path,
    fields: Mapping,
    dtype: torch.dtype,
    extra: Mapping[str, Tensor] | None,
    sidecar_files: Mapping[str, bytes] | None,
) -> None:
    """Write the files that go with the weights into the new folder, which then replaces the old one."""
    (fresh / "config.json").write_text(write_config(fields, dtype))
    for name, content in (sidecar_files or {}).items():
        (fresh / name).write_bytes(content)
    if extra:
        (fresh / EXTRA).parent.mkdir(exist_ok=True)
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in extra.items()}
        save_file(tensors, fresh / EXTRA, metadata={"format": "pt"})
        flush(fresh / EXTRA)
    replace(folder, fresh)


def prepare_folder(folder: str | Path, sidecar_names: Iterable[str] = ()) -> tuple[Path, Path]:
    """The folder, with links resolved, and the neighbouring folder to write into. The latter already has the other
    files: all except those that will be rewritten, `sidecar_names` included. Raises CheckpointError if a file is in the
    way of a folder, or a folder in the way of a file."""
    folder, sidecar_names = Path(os.path.realpath(folder)), set(sidecar_names)
    fresh = folder.with_name(f".{folder.name}.saving")
    for path in (folder, fresh, folder / EXTRA.parent):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise CheckpointError(
                f"{path} is a file or a link, but the checkpoint needs a folder of that name; move it away"
            )
    old_files = (
        [path for path in folder.iterdir() if CHECKPOINT_FILES.fullmatch(path.name) or path.name in sidecar_names]
        if folder.exists()
        else []
    )
    for path in [*old_files, folder / EXTRA]:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder, but the checkpoint needs a file of that name; move it away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)
    if folder.exists():
        shutil.copytree(folder, fresh, copy_function=link_or_copy, symlinks=True)
        for path in old_files:
            (fresh / path.name).unlink()
        if (fresh / EXTRA).exists():
            (fresh / EXTRA).unlink()
            if not any((fresh / EXTRA.parent).iterdir()):
                (fresh / EXTRA.parent).rmdir()
    else:
        fresh.mkdir()
    return folder, fresh


def replace(folder: Path, fresh: Path) -> None:
    """Replace the old folder with the new one, once all of it is on disk. If this process works inside the old
    folder, it moves to the same path in the new one."""
    for path in [*fresh.iterdir(), fresh]:
        flush(path)
    if folder.exists():
        try:
            working_folder = Path.cwd()
        except FileNotFoundError:  # deleted by someone else
            working_folder = None
        change_places(folder, fresh)
        if working_folder is not None and working_folder.is_relative_to(folder):
            os.chdir(working_folder)
        shutil.rmtree(fresh)
    else:
        os.rename(fresh, folder)
    flush(folder.parent)


def write_index(folder: Path, files: Mapping[str, str], total: int) -> None:
    """Write the index of a checkpoint of several files: tensor → file, `total` bytes in total."""
    record = {"metadata": {"total_size": total}, "weight_map": dict(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def split_shards(state: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, tuple[str, tuple]]]:
    """Split the parts, in order, into shards. A new shard starts if the next part would exceed `max_bytes`; a part is
    never split."""
    shards, room = [{}], max_bytes
    for name, tensor in state.items():
        for part, index in tensor_parts(name, tuple(tensor.shape)).items():
            size = tensor[index].nbytes
            if size > room and shards[-1]:
                shards, room = [*shards, {}], max_bytes
            shards[-1][part] = (name, index)
            room -= size
    return shards


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def change_places(a: Path, b: Path) -> None:
    """Swap two folders in one step (Linux's renameat2), or elsewhere with three renames, which are not atomic."""
    rename_exchange, at_fdcwd = 2, -100  # RENAME_EXCHANGE, AT_FDCWD
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename is not None and rename(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0:
            return
    spare_folder = a.with_name(f".{a.name}.aside")
    shutil.rmtree(spare_folder, ignore_errors=True)
    os.rename(a, spare_folder)
    os.rename(b, a)
    os.rename(spare_folder, b)
